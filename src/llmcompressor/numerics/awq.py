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

All candidates are judged by some of the rows, and the best of them by all: the errors of neighbours
on the grid differ little, and rows agree on which is small.

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

from llmcompressor.numerics.cholesky import WIDTH, QuadraticForm
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.products import MANY_ALIKE, fast_matmul_dtype, matmul
from llmcompressor.runtime.threads import parallel_spans

Duo: TypeAlias = bool | Literal["both"]
Round: TypeAlias = Callable[[Tensor], Tensor]
"""From a weight to the same weight rounded to its grid in new memory, both float32 ``[R, C]``."""

ScalesWithin: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the least and the greatest values of groups, float32 of one shape, to the scales that these
are divided by and the zero points, float32 of that shape; zeros on symmetric grids."""

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
_SAMPLED_ROWS, _SAMPLED = 128, 8
"""At least so many rows, and one of eight if those are more, are judged to find the candidates that
are then judged by all."""
_FINALISTS = 5
"""Candidates that are judged by all rows, beside no scaling at all."""
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

    def sample(self) -> StackedLinears:
        """Some of the rows, evenly spaced, if each is rounded by itself; else all."""
        step = _rows_apart(len(self.weight_RC)) if self.by_rows else 1
        return self._replace(weight_RC=self.weight_RC[::step])


def _rows_apart(rows: int) -> int:
    return max(min(rows // _SAMPLED_ROWS, _SAMPLED), 1)


def evaluations(points: int, rows: int) -> float:
    """How often a weight is judged by so many candidates, those of a sample as parts.

    >>> evaluations(20, 1024), evaluations(20, 100)
    (8.5, 26.0)
    """
    return points / _rows_apart(rows) + min(points, _FINALISTS) + 1


def output_error_from_gram(readers: Sequence[StackedLinears]) -> ErrorOf:
    """The output error ``sum_i tr(D_i G_i D_i^T)`` of Linears with one input, by scales."""

    def error_of(scale_KC: Tensor) -> list[float]:
        total_K = torch.zeros(len(scale_KC), dtype=torch.float64)
        for one in readers:
            found: dict[int, Tensor] = {}
            columns = one.gram_CC.shape[-1]
            products = min(len(one.weight_RC), _JUDGED_ROWS) * columns * min(columns, WIDTH)
            dtype = fast_matmul_dtype(one.gram_CC.device, products)
            form = QuadraticForm(one.gram_CC, dtype)

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
    error_of: ErrorOf,
    grid: Iterable[tuple[Candidate, Tensor]],
    one_C: Tensor,
    *,
    estimate_of: ErrorOf | None = None,
) -> ScaleChoice:
    """The candidate with the least error, or ones, if none is better or all errors are NaN.

    ``estimate_of`` tells nearly the same at less cost: then only the five candidates that are best
    by that, and ones, are compared.
    """
    tried: list[tuple[Candidate | None, Tensor]] = list(grid)
    if estimate_of is not None and len(tried) > _FINALISTS:
        estimates = estimate_of(torch.stack([scale_C for _, scale_C in tried]))
        best = sorted(range(len(tried)), key=lambda k: _or_infinite(estimates[k]))
        tried = [tried[k] for k in sorted(best[:_FINALISTS])]
    tried.insert(0, (None, one_C))
    found = error_of(torch.stack([scale_C for _, scale_C in tried]))
    best_k = min(range(len(tried)), key=lambda k: _or_infinite(found[k]))
    return ScaleChoice(tried[best_k][1], tried[best_k][0], found[best_k], found[0])


def _or_infinite(error: float) -> float:
    return math.inf if math.isnan(error) else error


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
    grid: Grid,
    scales_within: ScalesWithin,
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
        grid: the grid that the weight is rounded to.
        scales_within: scales and zero points of groups with given bounds.
        group: g, columns of a group.
        sweeps: number of sweeps.
    """
    rows, columns = weight_RC.shape
    shape = (rows, columns // group)
    found = Bounds(
        *(torch.empty(shape, dtype=torch.float32, device=weight_RC.device) for _ in range(2))
    )

    def clip(span: slice) -> None:
        part = _clip_rows(weight_RC[span], gram_CC, grid, scales_within, group, sweeps)
        found.low_RN[span], found.high_RN[span] = part.low_RN, part.high_RN

    parallel_spans(clip, rows, weight_RC.device, width=CLIPPED_ROWS)
    return found


def _clip_rows(
    weight_RC: Tensor,
    gram_CC: Tensor,
    grid: Grid,
    scales_within: ScalesWithin,
    group: int,
    sweeps: int,
) -> Bounds:
    """:func:`clip_bounds` of some rows, which are independent of all others."""
    rows, columns = weight_RC.shape
    weight_NRg = weight_RC.detach().float().reshape(rows, -1, group).transpose(0, 1).contiguous()
    least_NR = weight_NRg.amin(dim=-1).clamp(max=0)
    greatest_NR = weight_NRg.amax(dim=-1).clamp(min=0)
    low_NR, high_NR = torch.ones_like(least_NR), torch.ones_like(least_NR)
    change_RC = torch.zeros(rows, columns, dtype=torch.float32, device=weight_RC.device)
    for sweep in range(-1, sweeps):  # before the first one, the change of rounding alone
        attempts = _EITHER_END if sweep > 0 else _BOTH_ENDS if sweep == 0 else [(1.0, 1.0)]
        tried_K2 = change_RC.new_tensor(attempts)
        low_NKR, high_NKR = (
            (tried_K2[:, end : end + 1] * part_NR.unsqueeze(1)).clamp(max=1)
            for end, part_NR in enumerate((low_NR, high_NR))
        )
        ends = low_NKR * least_NR.unsqueeze(1), high_NKR * greatest_NR.unsqueeze(1)
        parameters = scales_within(*ends)
        for n, begin in enumerate(range(0, columns, group)):
            span = slice(begin, begin + group)
            at_n = [one_NKR[n] for one_NKR in (*ends, *parameters)]
            lost_KRg, unit_KR = _lost(weight_NRg[n], at_n, grid)
            best_1R = torch.zeros(1, rows, dtype=torch.int64, device=weight_RC.device)
            if len(attempts) > 1:
                own_gg = gram_CC[span, span].contiguous()
                # G is symmetric, and its rows are dense
                others_Rg = matmul(change_RC, gram_CC[span].T, fewest=MANY_ALIKE)
                others_Rg -= change_RC[:, span] @ own_gg
                # d G_gg d + 2 d (D G)_g, both sides in the unit
                slope_JRg = matmul(lost_KRg.flatten(0, 1), own_gg, fewest=MANY_ALIKE)
                slope_KRg = slope_JRg.view(lost_KRg.shape)
                slope_KRg.addcmul_(others_Rg, (2 / unit_KR).unsqueeze(-1))
                error_KR = slope_KRg.mul_(lost_KRg).sum(dim=-1).mul_(unit_KR.square())
                best_1R = error_KR.nan_to_num(nan=torch.inf).argmin(dim=0, keepdim=True)
            low_NR[n], high_NR[n] = (one[n].gather(0, best_1R)[0] for one in (low_NKR, high_NKR))
            index_1Rg = best_1R.unsqueeze(-1).expand(1, rows, group)
            lost_Rg, unit_R1 = lost_KRg.gather(0, index_1Rg)[0], unit_KR.gather(0, best_1R).T
            change_RC[:, span] = lost_Rg * unit_R1
    return Bounds((least_NR * low_NR).T, (greatest_NR * high_NR).T)


def _lost(weight_Rg: Tensor, attempts_KR: Sequence[Tensor], grid: Grid) -> tuple[Tensor, Tensor]:
    """What clamping and rounding change, ``[K, R, g]``, and its unit, ``[K, R]``.

    ``attempts_KR`` are the least and the greatest values, scales and zero points. On an integer
    grid the unit is the scale. Zero points are integers, and need not be added there:
    ``round(w / s + z) − z = round(w / s)``.
    """
    least_KR, greatest_KR, scale_KR, zero_KR = attempts_KR
    if grid.kind != "int":
        clamped_KRg = weight_Rg.clamp(least_KR.unsqueeze(-1), greatest_KR.unsqueeze(-1))
        zero_KR1 = None if grid.symmetric else zero_KR.unsqueeze(-1)
        rounded_KRg = grid.fake_quantize(clamped_KRg, scale_KR.unsqueeze(-1), zero_KR1)
        return rounded_KRg.sub_(weight_Rg), torch.ones_like(scale_KR)
    lowest_KR = torch.maximum(least_KR / scale_KR, grid.qmin - zero_KR)
    highest_KR = torch.minimum(greatest_KR / scale_KR, grid.qmax - zero_KR)
    quotient_KRg = weight_Rg * scale_KR.reciprocal().unsqueeze(-1)
    lost_KRg = torch.maximum(quotient_KRg, lowest_KR.unsqueeze(-1))
    torch.minimum(lost_KRg, highest_KR.unsqueeze(-1), out=lost_KRg)
    return lost_KRg.round_().sub_(quotient_KRg), scale_KR
