# SPDX-License-Identifier: Apache-2.0
r"""Activation-aware scales and clips of weights, judged by second moments of the inputs.

Lin et al., *AWQ*, arXiv:2306.00978. Columns that meet large inputs are multiplied by s before
they are rounded, and what feeds them is divided by it. With Q rounding to the grid, W of R rows
and C columns, and inputs X (T tokens by C columns) with ``G = X^T X``, the error of a candidate
is that of the Linear's output, and needs no forward::

    D = Q(W diag(s)) diag(s)^-1 - W,      |X D^T|^2 = tr(D G D^T)

The candidates are a grid of exponents r over the mean absolute input x and the mean w of the
weights' absolute values relative to the greatest of their group::

    s = x^r                       ("plain")
    s = x^r / (w^(1-r) + 1e-4)    ("duo")
    s = max(s, 1e-4) / sqrt(max(s) min(s))

*Clipping* lowers the ends [a, b] of each group of a row, which rounds all others more finely.
Of its group's columns the block of G is what matters::

    (p, q) = argmin  d G_gg d^T,      d = Q(clamp(w, p a, q b)) - w

K candidates, g columns of a group, N groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Bounds",
    "Candidate",
    "Duo",
    "ErrorOf",
    "Readers",
    "Round",
    "ScaleChoice",
    "candidates",
    "choose_scale",
    "clip_bounds",
    "statistics_error",
    "weight_prominence",
]

Duo: TypeAlias = bool | Literal["both"]
Round: TypeAlias = Callable[[Tensor], Tensor]
"""From a weight to the same weight rounded to its grid, both ``[R, C]``."""

ErrorOf: TypeAlias = Callable[[Tensor], Sequence[float]]
"""From scales ``[K, C]`` to the error of each."""

_FLOOR = 1e-4
_TINY = 1e-6
_FRACTIONS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
_STEPS = (0.9, 0.95, 1.05, 1.1)
_AT_ONCE = 2**20
"""Elements of the weights of several candidates that are rounded at once; small ones gain by it."""
_MOST_ELEMENTS = 2**24


class Candidate(NamedTuple):
    """One point of the grid."""

    ratio: float
    """r, the exponent of the inputs."""
    duo: bool
    """Whether the weights count too."""


class ScaleChoice(NamedTuple):
    """The best candidate."""

    scale_C: Tensor
    candidate: Candidate | None
    """``None`` where none was better than no scaling at all."""
    error: float
    before: float
    """The error without scaling."""


def weight_prominence(weights: Sequence[Tensor], group: int) -> Tensor:
    """How large each column's values are beside the greatest of their group, in the mean.

    Args:
        weights: each ``[R_i, C]``, any floating dtype.
        group: columns of a group; C for one group per row.

    Returns:
        float32 ``[C]``, from 0 to 1.

    >>> weight_prominence([torch.tensor([[1.0, 2.0, 4.0, 4.0]])], 2)
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


def _grid(points: int, duo: Duo) -> Iterator[Candidate]:
    if duo == "both":
        half = max(points // 2, 2)
        for index in range(half):
            yield from (Candidate(index / (half - 1), both) for both in (False, True))
    elif duo:
        yield Candidate(0.0, duo=False)
        for index in range(points - 1):
            yield Candidate(index / max(points - 2, 1), duo=True)
    else:
        for index in range(points):
            yield Candidate(index / max(points - 1, 1), duo=False)


def candidates(
    input_C: Tensor, weight_C: Tensor, points: int, duo: Duo
) -> Iterator[tuple[Candidate, Tensor]]:
    """The grid of scales to try.

    Args:
        input_C: mean absolute input of each column, ``[C]``.
        weight_C: as :func:`weight_prominence` gives it.
        points: how many, at least 2.
        duo: weigh inputs against weights (``True``), look at inputs alone (``False``), or both.

    Yields:
        The candidate and its scale, float32 ``[C]``, finite and positive.
    """
    for candidate in _grid(points, duo):
        scale_C = input_C.float().pow(candidate.ratio)
        if candidate.duo:
            scale_C = scale_C / (weight_C.float().pow(1 - candidate.ratio) + _FLOOR)
        yield candidate, _normalized(scale_C)


def _normalized(scale_C: Tensor) -> Tensor:
    """Centred around one; what is not finite becomes one, and nothing is zero."""
    scale_C = scale_C.clamp(min=_FLOOR)
    scale_C = torch.where(torch.isfinite(scale_C), scale_C, 1.0)
    scale_C = scale_C / (scale_C.max() * scale_C.min()).sqrt()
    return torch.where(torch.isfinite(scale_C) & (scale_C > 0), scale_C, 1.0)


class Readers(NamedTuple):
    """Linears that get one tensor and are rounded alike, their rows stacked."""

    weight_RC: Tensor
    """Any floating dtype."""
    gram_CC: Tensor
    """G of their inputs, float32."""
    round_: Round
    by_rows: bool
    """Whether a row is rounded by itself, so that rows of several candidates can be stacked."""


def statistics_error(readers: Sequence[Readers]) -> ErrorOf:
    """How far a scale moves the outputs of Linears that read one tensor.

    Args:
        readers: all of them.

    Returns:
        From scales ``[K, C]`` to ``sum_i tr(D_i G_i D_i^T)`` of each.
    """

    def errors(scale_KC: Tensor, one: Readers) -> Tensor:
        wide_RC = one.weight_RC.detach().float()
        scaled_KRC = (wide_RC * scale_KC.unsqueeze(1)).to(one.weight_RC.dtype)
        rounded_KRC = one.round_(scaled_KRC.flatten(0, 1)).float().reshape(scaled_KRC.shape)
        change_KRC = rounded_KRC.div_(scale_KC.unsqueeze(1)).sub_(wide_RC)
        return ((change_KRC @ one.gram_CC) * change_KRC).sum(dim=(1, 2))

    def error_of(scale_KC: Tensor) -> list[float]:
        total_K = torch.zeros(len(scale_KC), dtype=torch.float64)
        for one in readers:
            at_once = max(1, _AT_ONCE // one.weight_RC.numel()) if one.by_rows else 1
            parts = [errors(part_KC, one) for part_KC in torch.split(scale_KC, at_once)]
            total_K += torch.cat(parts).double().cpu()
        return [float(total) for total in total_K]

    return error_of


def choose_scale(
    error_of: ErrorOf, grid: Iterable[tuple[Candidate, Tensor]], one_C: Tensor
) -> ScaleChoice:
    """The scale with the least error.

    Args:
        error_of: from scales ``[K, C]`` to the error of each.
        grid: candidates; see :func:`candidates`.
        one_C: a scale of ones, tried first.

    Returns:
        The choice; ones where no candidate is better, or all errors are NaN.
    """
    tried: list[tuple[Candidate | None, Tensor]] = [(None, one_C), *grid]
    found = error_of(torch.stack([scale_C for _, scale_C in tried]))
    best = min(range(len(tried)), key=lambda k: math.inf if math.isnan(found[k]) else found[k])
    return ScaleChoice(tried[best][1], tried[best][0], found[best], found[0])


class Bounds(NamedTuple):
    """The ends that each group of a row is clamped to, float32 ``[R, N]``."""

    low_RN: Tensor
    high_RN: Tensor

    def clamp(self, weight_RC: Tensor) -> Tensor:
        """The weight within these ends, in its own dtype.

        >>> Bounds(torch.tensor([[-1.0]]), torch.tensor([[2.0]])).clamp(torch.tensor([[-3.0, 3.0]]))
        tensor([[-1.,  2.]])
        """
        weight_RNg = weight_RC.reshape(*self.low_RN.shape, -1).float()
        low_RN1, high_RN1 = self.low_RN.unsqueeze(-1), self.high_RN.unsqueeze(-1)
        return weight_RNg.clamp(low_RN1, high_RN1).to(weight_RC.dtype).reshape(weight_RC.shape)


def clip_bounds(weight_RC: Tensor, gram_CC: Tensor, round_: Round, group: int) -> Bounds:
    """The ends of each group with the least output error.

    Both ends are lowered together to each of a few fractions, then each alone by small steps.

    Args:
        weight_RC: any floating dtype; C is a multiple of ``group``.
        gram_CC: G of its inputs, float32.
        round_: rounds weights of any number of rows, each group of a row by itself.
        group: columns of a group.
    """
    columns = weight_RC.shape[-1]
    groups = torch.arange(columns, device=gram_CC.device).reshape(-1, group)
    gram_Ngg = gram_CC[groups.unsqueeze(-1), groups.unsqueeze(-2)]
    rows = max(1, _MOST_ELEMENTS // columns)
    parts = [
        _part_bounds(part_RC, gram_Ngg, round_) for part_RC in torch.split(weight_RC.detach(), rows)
    ]
    return Bounds(torch.cat([low for low, _ in parts]), torch.cat([high for _, high in parts]))


def _part_bounds(weight_RC: Tensor, gram_Ngg: Tensor, round_: Round) -> Bounds:
    wide_RNg = weight_RC.float().reshape(len(weight_RC), len(gram_Ngg), -1)
    least_RN = wide_RNg.amin(dim=-1).clamp(max=0)
    greatest_RN = wide_RNg.amax(dim=-1).clamp(min=0)

    def error_of(low_RN: Tensor, high_RN: Tensor) -> Tensor:
        clamped_RC = Bounds(least_RN * low_RN, greatest_RN * high_RN).clamp(weight_RC)
        change_RNg = round_(clamped_RC).float().reshape(wide_RNg.shape) - wide_RNg
        change_NRg = change_RNg.transpose(0, 1)
        return ((change_NRg @ gram_Ngg) * change_NRg).sum(dim=-1).T

    low_RN, high_RN = torch.ones_like(least_RN), torch.ones_like(least_RN)
    best_RN = error_of(low_RN, high_RN)

    def attempt(new_low_RN: Tensor, new_high_RN: Tensor) -> None:
        nonlocal best_RN, low_RN, high_RN
        error_RN = error_of(new_low_RN, new_high_RN)
        better_RN = error_RN < best_RN
        best_RN = torch.where(better_RN, error_RN, best_RN)
        low_RN = torch.where(better_RN, new_low_RN, low_RN)
        high_RN = torch.where(better_RN, new_high_RN, high_RN)

    for fraction in _FRACTIONS:
        both_RN = torch.full_like(least_RN, fraction)
        attempt(both_RN, both_RN)
    first_low_RN, first_high_RN = low_RN, high_RN
    for step in _STEPS:
        attempt((first_low_RN * step).clamp(max=1), first_high_RN)
    second_low_RN = low_RN
    for step in _STEPS:
        attempt(second_low_RN, (first_high_RN * step).clamp(max=1))
    return Bounds(least_RN * low_RN, greatest_RN * high_RN)
