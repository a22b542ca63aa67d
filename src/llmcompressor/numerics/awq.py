# SPDX-License-Identifier: Apache-2.0
r"""AWQ: activation-aware scales and clipping of weights, from second moments of the inputs.

Lin et al., *AWQ*, arXiv:2306.00978. Columns with large inputs are multiplied by s before they are
rounded, and the preceding layer is divided by it. With Q rounding to the grid, W of R rows and C
columns, and inputs X (T tokens by C columns) with ``G = X^T X``, the error of a candidate is the
error of the Linear's output, and needs no forward::

    D = Q(W diag(s)) diag(s)^-1 - W,      |X D^T|^2 = tr(D G D^T)

The candidates are a grid of exponents r over the mean absolute input x and the mean w of the
weights' absolute values relative to the greatest of their group::

    s = x^r                       ("plain")
    s = x^r / (w^(1-r) + 1e-4)    ("duo")
    s = max(s, 1e-4) / sqrt(max(s) min(s))

*Clipping* lowers the ends [a, b] of a group of a row, which rounds all its values more finely. The
groups are clipped one after another, given the errors D of all the others, so that the error of the
output never rises::

    (p, q) = argmin  d G_gg d^T + 2 d (D G)_g,      d = Q(clamp(w, p a, q b)) - w

K candidates, g columns of a group, N groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from llmcompressor.numerics.cholesky import QuadraticForm
from llmcompressor.numerics.products import MANY_ALIKE, matmul
from llmcompressor.runtime.threads import parallel_spans

Duo: TypeAlias = bool | Literal["both"]
Round: TypeAlias = Callable[[Tensor], Tensor]
"""From a weight to the same weight rounded to its grid in new memory, both float32 ``[R, C]``."""

RoundWithin: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The same for one group, ``[R, g]``, by the least and the greatest value of each row, ``[R]``."""

ErrorOf: TypeAlias = Callable[[Tensor], Sequence[float]]
"""From scales ``[K, C]`` to the error of each."""

_FLOOR = 1e-4
_TINY = 1e-6
_BOTH_ENDS = [(part, part) for part in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)]
_STEPS = (0.9, 0.95, 1.05, 1.1)
_EITHER_END = [(1.0, 1.0), *((step, 1.0) for step in _STEPS), *((1.0, step) for step in _STEPS)]
CLIP_ATTEMPTS = (len(_BOTH_ENDS), len(_EITHER_END))
"""Pairs of ends that each sweep of :func:`clip_bounds` tries for a group."""
_AT_ONCE = 2**18
"""Elements of the weights of several candidates that are rounded at once: they fit a core's cache,
and few rows gain by it."""
_JUDGED_ROWS = 256
CLIPPED_ROWS = 256
"""Rows that one thread works on: enough that beginning an operation costs little beside it, and few
enough that all attempts at a group of them nearly fit its cache."""


class Candidate(NamedTuple):
    """A point of the search grid of scales."""

    ratio: float
    """r, the exponent of the inputs."""
    duo: bool
    """Whether the weights count too."""


class ScaleChoice(NamedTuple):
    """The candidate with the least error, its scale, and the error without scaling."""

    scale_C: Tensor
    candidate: Candidate | None
    """``None`` where none was better than no scaling at all."""
    error: float
    before: float


def relative_column_magnitude(weights: Sequence[Tensor], group: int) -> Tensor:
    """Mean absolute value of each column relative to the maximum of its group: float32 ``[C]``.

    ``weights`` are ``[R_i, C]`` of any floating dtype; groups of C columns are one per row.

    >>> relative_column_magnitude([torch.tensor([[1.0, 2.0, 4.0, 4.0]])], 2)
    tensor([0.5000, 1.0000, 1.0000, 1.0000])
    """
    total_C = torch.zeros(weights[0].shape[-1], device=weights[0].device)
    rows = 0
    for weight_RC in weights:
        size_RC = weight_RC.detach().abs().float()
        rows_i, columns = size_RC.shape
        width = group if 0 < group < columns and columns % group == 0 else columns
        size_RNg = size_RC.reshape(rows_i, -1, width)
        relative_RNg = size_RNg / (size_RNg.amax(dim=-1, keepdim=True) + _TINY)
        total_C += relative_RNg.reshape(rows_i, columns).sum(dim=0)
        rows += rows_i
    return total_C / rows


def _candidate_grid(points: int, duo: Duo) -> list[Candidate]:
    if duo == "both":
        half = max(points // 2, 2)
        return [Candidate(k / (half - 1), both) for k in range(half) for both in (False, True)]
    if duo:
        every = [Candidate(k / max(points - 2, 1), duo=True) for k in range(points - 1)]
        return [Candidate(0.0, duo=False), *every]
    return [Candidate(k / max(points - 1, 1), duo=False) for k in range(points)]


def candidates(
    input_C: Tensor, weight_C: Tensor, points: int, duo: Duo
) -> Iterator[tuple[Candidate, Tensor]]:
    """The candidates of the grid search with their scales, float32 ``[C]``, finite and positive.

    A column whose input is zero keeps its size: scaled by ``0^r`` it would be rounded to zero, and
    be lost to later inputs.

    Args:
        input_C: mean absolute input of each column, ``[C]``.
        weight_C: result of :func:`relative_column_magnitude`.
        points: number of exponents, at least 2.
        duo: divide by weights (``True``), use inputs alone (``False``), or try both.
    """
    is_live_C = (input_C != 0) | ~(input_C != 0).any()
    for candidate in _candidate_grid(points, duo):
        scale_C = input_C.float().pow(candidate.ratio)
        if candidate.duo:
            scale_C = scale_C / (weight_C.float().pow(1 - candidate.ratio) + _FLOOR)
        # centred around one; non-finite values become one, and none is zero
        scale_C = scale_C.clamp(min=_FLOOR)
        scale_C = torch.where(torch.isfinite(scale_C), scale_C, 1.0)
        live_L = scale_C[is_live_C]
        scale_C = scale_C / (live_L.max() * live_L.min()).sqrt()
        is_good_C = torch.isfinite(scale_C) & (scale_C > 0) & is_live_C
        yield candidate, torch.where(is_good_C, scale_C, 1.0)


class StackedLinears(NamedTuple):
    """Linears with one input and the same rounding, their rows stacked."""

    weight_RC: Tensor
    """Any floating dtype."""
    gram_CC: Tensor
    """G of their inputs, float32."""
    round_: Round
    by_rows: bool
    """Whether a row is rounded by itself, so that rows of several candidates can be stacked."""


def output_error_from_gram(readers: Sequence[StackedLinears]) -> ErrorOf:
    """The output error ``sum_i tr(D_i G_i D_i^T)`` of Linears with one input, by scales."""

    def error_of(scale_KC: Tensor) -> list[float]:
        total_K = torch.zeros(len(scale_KC), dtype=torch.float64)
        for one in readers:
            found: dict[int, Tensor] = {}
            form = QuadraticForm(one.gram_CC)

            def judge(
                span: slice,
                one: StackedLinears = one,
                form: QuadraticForm = form,
                found: dict[int, Tensor] = found,
            ) -> None:
                found[span.start or 0] = _errors(one, form, span, scale_KC)

            rows = len(one.weight_RC)
            width = _JUDGED_ROWS if one.by_rows else rows
            parallel_spans(judge, rows, one.weight_RC.device, width=width)
            for begin in sorted(found):
                total_K += found[begin].cpu()
        return [float(total) for total in total_K]

    return error_of


def _errors(one: StackedLinears, form: QuadraticForm, rows: slice, scale_KC: Tensor) -> Tensor:
    """``tr(D G D^T)`` of some rows for each scale, float64 ``[K]``."""
    wide_RC = one.weight_RC[rows].detach().float()
    at_once = max(1, _AT_ONCE // wide_RC.numel()) if one.by_rows else 1
    errors = []
    for part_KC in torch.split(scale_KC, at_once):
        scaled_KRC = wide_RC * part_KC.unsqueeze(1)
        rounded_KRC = one.round_(scaled_KRC.flatten(0, 1)).reshape(scaled_KRC.shape)
        change_KRC = rounded_KRC.div_(part_KC.unsqueeze(1)).sub_(wide_RC)
        errors.append(form(change_KRC.flatten(0, 1)).reshape(len(part_KC), -1).sum(dim=1))
    return torch.cat(errors).double()


def choose_scale(
    error_of: ErrorOf, grid: Iterable[tuple[Candidate, Tensor]], one_C: Tensor
) -> ScaleChoice:
    """The candidate with the least error, or ones, if none is better or all errors are NaN."""
    tried: list[tuple[Candidate | None, Tensor]] = [(None, one_C), *grid]
    found = error_of(torch.stack([scale_C for _, scale_C in tried]))
    best = min(range(len(tried)), key=lambda k: math.inf if math.isnan(found[k]) else found[k])
    return ScaleChoice(tried[best][1], tried[best][0], found[best], found[0])


class Bounds(NamedTuple):
    """The clipping bounds of each group of a row, float32 ``[R, N]``."""

    low_RN: Tensor
    high_RN: Tensor

    def clamp(self, weight_RC: Tensor) -> Tensor:
        """The weight clamped to these bounds, in its own dtype.

        >>> Bounds(torch.tensor([[-1.0]]), torch.tensor([[2.0]])).clamp(torch.tensor([[-3.0, 3.0]]))
        tensor([[-1.,  2.]])
        """
        weight_RNg = weight_RC.reshape(*self.low_RN.shape, -1).float()
        low_RN1, high_RN1 = self.low_RN.unsqueeze(-1), self.high_RN.unsqueeze(-1)
        return weight_RNg.clamp(low_RN1, high_RN1).to(weight_RC.dtype).reshape(weight_RC.shape)


def clip_bounds(
    weight_RC: Tensor,
    gram_CC: Tensor,
    round_: RoundWithin,
    group: int,
    *,
    sweeps: int = len(CLIP_ATTEMPTS),
) -> Bounds:
    """The clipping bounds of each group with the least output error, optimized group by group.

    The first of ``sweeps`` over all groups tries fractions of both bounds at once, later ones
    change either of them; the error falls with each.

    Args:
        weight_RC: any floating dtype; C is a multiple of ``group``.
        gram_CC: G of its inputs, float32.
        round_: rounds one group of any number of rows, ``[R, g]``, each row by itself, within
            given bounds.
        group: g, columns of a group.
        sweeps: number of sweeps.
    """
    rows, columns = weight_RC.shape
    shape = (rows, columns // group)
    found = Bounds(
        *(torch.empty(shape, dtype=torch.float32, device=weight_RC.device) for _ in range(2))
    )

    def clip(span: slice) -> None:
        part = _clip_rows(weight_RC[span], gram_CC, round_, group, sweeps)
        found.low_RN[span], found.high_RN[span] = part.low_RN, part.high_RN

    parallel_spans(clip, rows, weight_RC.device, width=CLIPPED_ROWS)
    return found


def _clip_rows(
    weight_RC: Tensor, gram_CC: Tensor, round_: RoundWithin, group: int, sweeps: int
) -> Bounds:
    """:func:`clip_bounds` of some rows, which are independent of all others."""
    rows, columns = weight_RC.shape
    wide_RC = weight_RC.detach().float()
    weight_NRg = wide_RC.reshape(rows, -1, group).transpose(0, 1).contiguous()
    least_NR = weight_NRg.amin(dim=-1).clamp(max=0)
    greatest_NR = weight_NRg.amax(dim=-1).clamp(min=0)
    low_NR, high_NR = torch.ones_like(least_NR), torch.ones_like(least_NR)
    whole = zip(weight_NRg, least_NR, greatest_NR, strict=True)
    change_RC = torch.cat([round_(*one) for one in whole], dim=1).sub_(wide_RC)
    for sweep in range(sweeps):
        tried_K2 = wide_RC.new_tensor(_EITHER_END if sweep else _BOTH_ENDS)
        low_K1, high_K1 = tried_K2[:, :1], tried_K2[:, 1:]
        for n, begin in enumerate(range(0, columns, group)):
            span = slice(begin, begin + group)
            own_gg = gram_CC[span, span].contiguous()
            # G is symmetric, and its rows are dense
            others_Rg = matmul(change_RC, gram_CC[span].T, fewest=MANY_ALIKE)
            others_Rg -= change_RC[:, span] @ own_gg
            low_KR = (low_K1 * low_NR[n]).clamp(max=1)
            high_KR = (high_K1 * high_NR[n]).clamp(max=1)
            ends_KR = low_KR * least_NR[n], high_KR * greatest_NR[n]
            clamped_KRg = weight_NRg[n].clamp(*(end_KR.unsqueeze(-1) for end_KR in ends_KR))
            rounded_JRg = round_(clamped_KRg.flatten(0, 1), *(end.flatten() for end in ends_KR))
            change_KRg = rounded_JRg.reshape(clamped_KRg.shape).sub_(weight_NRg[n])
            slope_JRg = matmul(change_KRg.flatten(0, 1), own_gg, fewest=MANY_ALIKE)
            slope_KRg = slope_JRg.reshape(change_KRg.shape).add_(others_Rg, alpha=2)
            error_KR = slope_KRg.mul_(change_KRg).sum(dim=-1)
            best_1R = error_KR.nan_to_num(nan=torch.inf).argmin(dim=0, keepdim=True)
            low_NR[n] = low_KR.gather(0, best_1R)[0]
            high_NR[n] = high_KR.gather(0, best_1R)[0]
            index_1Rg = best_1R.unsqueeze(-1).expand(1, rows, group)
            change_RC[:, span] = change_KRg.gather(0, index_1Rg)[0]
    return Bounds((least_NR * low_NR).T, (greatest_NR * high_NR).T)
