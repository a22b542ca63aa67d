# SPDX-License-Identifier: Apache-2.0
"""Search over shrunk ranges for the one with the least rounding error.

Clamping a few large values lets all the others be rounded more finely. With a cell's extremes
[a, b], the fractions p_i = 1 - i / resolution and Q_p rounding with the scale of [p a, p b]::

    p* = argmin_p  sum_n m_n |x_n - Q_p(x_n)|^norm

separately for each cell. m weights the error of each element, by the mean square of its input
feature; without it all count the same. The fractions go down from 1 and the search ends after
``patience`` of them in a row that improved no cell at all.

Shapes: S cells (one scale each), N elements of a cell, P period of the weights, K fractions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llmcompressor.errors import InputError
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.scales import ScaleFormat, scales_from_range

_CHUNK_ELEMENTS = 1 << 18
_FRACTIONS_AT_ONCE = 5


class BestSoFar:
    """The candidate with the least error of each cell: tensors [S], and its error."""

    def __init__(self, error_S: Tensor, *candidate_S: Tensor) -> None:
        self.error_S, self.candidate_S = error_S, candidate_S

    def take(self, error_S: Tensor, *candidate_S: Tensor) -> None:
        """Keep another candidate where its error is less; NaN never is."""
        better_S = error_S < self.error_S
        self.error_S = torch.where(better_S, error_S, self.error_S)
        pairs = zip(candidate_S, self.candidate_S, strict=True)
        self.candidate_S = tuple(torch.where(better_S, new, old) for new, old in pairs)


@dataclass(frozen=True)
class ShrinkSearch:
    """The fractions of the range to try, and the error to minimize.

    Args:
        maxshrink: the smallest fraction is about 1 - maxshrink; 0 to 1.
        patience: stop after this many fractions in a row without any improvement; 0 for never.
        resolution: number of fractions between 1 and 0.
        norm: the error's exponent.
        expand: the range that counts as fraction 1, relative to the extremes.
        inclusive: also try the fraction 1 - maxshrink itself.

    >>> ShrinkSearch(maxshrink=0.3, resolution=10).fractions()
    [1.0, 0.9, 0.8]
    >>> ShrinkSearch(maxshrink=0.3, resolution=10, inclusive=True).fractions()
    [1.0, 0.9, 0.8, 0.7]
    """

    maxshrink: float = 0.2
    patience: int = 5
    resolution: int = 100
    norm: float = 2.4
    expand: float = 1.0
    inclusive: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.maxshrink <= 1:
            raise InputError(f"maxshrink is {self.maxshrink}.", "Give a number from 0 to 1.")
        if self.patience < 0:
            raise InputError(f"patience is {self.patience}.", "Give 0 or more.")
        for name in ("resolution", "norm", "expand"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}.", "Give a number above 0.")

    def fractions(self) -> list[float]:
        """The fractions of the range to try, in order; at least one, and none below zero."""
        steps = max(1, int(self.maxshrink * self.resolution)) + int(self.inclusive)
        return [1 - i / self.resolution for i in range(min(steps, self.resolution + 1))]


def search_range(
    values_SN: Tensor,
    grid: Grid,
    search: ShrinkSearch,
    *,
    importance_PN: Tensor | None = None,
    scale_format: ScaleFormat = ScaleFormat.PLAIN,
    scale_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The shrunk range of each cell with the least error.

    Besides ``values_SN``, memory for a chunk of it and for S * K numbers is used.

    Args:
        values_SN: elements of each cell, floating dtype; zeros may pad them.
        grid: the grid that values are rounded to.
        search: fractions and error.
        importance_PN: weight of each element's error, not negative; cell s uses row s mod P.
        scale_format: how scales will be stored. Scales under a global scale (``E4M3``) are
            searched without it and without their rounding: the global scale depends on the result.
        scale_dtype: floating dtype that plain scales are rounded to.

    Returns:
        Minimum and maximum of each range, [S], in the dtype of ``values_SN``.

    >>> x = torch.tensor([[0.9, 1.0, 1.1, 2.0, 3.9]])
    >>> search_range(x, Grid("int", 3), ShrinkSearch(maxshrink=0.5, patience=0, norm=2.0))
    (tensor([0.9000]), tensor([3.9000]))
    """
    S, N = values_SN.shape
    if values_SN.numel() == 0:
        raise InputError("There are no values to search a range for.", "Observe some first.")
    if importance_PN is not None and (
        importance_PN.ndim != 2 or importance_PN.shape[1] != N or S % importance_PN.shape[0]
    ):
        raise InputError(
            f"Importance of shape {tuple(importance_PN.shape)} does not fit cells [{S}, {N}].",
            f"Give rows of {N} whose number divides {S}.",
        )
    scales = partial(
        scales_from_range,
        grid=grid,
        scale_format=ScaleFormat.PLAIN if scale_format is ScaleFormat.E4M3 else scale_format,
        scale_dtype=scale_dtype,
        stored_in=values_SN.dtype,
    )
    lowest_S, highest_S = values_SN.amin(1) * search.expand, values_SN.amax(1) * search.expand
    worst_S = torch.full_like(lowest_S, torch.inf, dtype=torch.float32)
    best, idle = BestSoFar(worst_S, lowest_S, highest_S), 0
    fractions = search.fractions()
    for start in range(0, len(fractions), _FRACTIONS_AT_ONCE):
        tried = fractions[start : start + _FRACTIONS_AT_ONCE]
        low_KS = torch.stack([p * lowest_S for p in tried])
        high_KS = torch.stack([p * highest_S for p in tried])
        scale_KS, zero_KS = scales(low_KS, high_KS)
        zero = None if grid.symmetric else zero_KS
        error_KS = _errors(values_SN, scale_KS, zero, grid, search.norm, importance_PN)
        counted = len(tried)
        if search.patience:
            counted, idle = _counted(best.error_S, error_KS, search.patience, idle)
        for each in zip(error_KS[:counted], low_KS, high_KS, strict=False):
            best.take(*each)
        if search.patience and idle >= search.patience:
            break
    low_S, high_S = best.candidate_S
    return low_S, high_S


def _counted(least_S: Tensor, error_KS: Tensor, patience: int, idle: int) -> tuple[int, int]:
    """Number of fractions before patience runs out, with one device synchronization; and idle."""
    improves = []
    for error_S in error_KS:
        improves.append((error_S < least_S).any())
        least_S = torch.fmin(least_S, error_S)  # of a number and NaN the number
    for number, improved in enumerate(torch.stack(improves).tolist()):
        idle = 0 if improved else idle + 1
        if idle >= patience:
            return number, idle
    return len(error_KS), idle


def _errors(
    values_SN: Tensor,
    scale_KS: Tensor,
    zero_KS: Tensor | None,
    grid: Grid,
    norm: float,
    importance_PN: Tensor | None,
) -> Tensor:
    """Sum of weighted errors of each cell [K, S] for each of K ranges, in float32.

    Chunks are small enough to stay in a cache while all K ranges are tried on them, as many at once
    as make up a chunk.
    """
    error_KS = torch.zeros_like(scale_KS, dtype=torch.float32)
    period = 1 if importance_PN is None else len(importance_PN)
    S, N = values_SN.shape
    for rows, columns in _chunks(S, N, period):
        part = values_SN[rows, columns]
        exact = part.float()
        weight = None if importance_PN is None else importance_PN[:, columns].float()
        height = max(1, _CHUNK_ELEMENTS // part.numel())
        for first in range(0, len(error_KS), height):
            some = slice(first, first + height)
            scale = scale_KS[some, rows, None]
            zero = None if zero_KS is None else zero_KS[some, rows, None]
            rounded = grid.fake_quantize(part.expand(len(scale), *part.shape), scale, zero)
            loss = power_(rounded.to(torch.float32).sub_(exact).abs_(), norm)
            if weight is not None:
                loss.unflatten(1, (-1, period)).mul_(weight)  # type: ignore[no-untyped-call]
            error_KS[some, rows] += loss.sum(-1)
    return error_KS


def power_(x: Tensor, norm: float) -> Tensor:
    """``x ** norm`` in place for x not negative; ``pow`` is slow at fractional exponents."""
    return x.pow_(norm) if float(norm).is_integer() else x.log2_().mul_(norm).exp2_()


def _chunks(S: int, N: int, period: int) -> Iterator[tuple[slice, slice]]:
    """Rectangles of about the chunk size that cover [S, N], whole periods of rows high."""
    width = min(N, max(1, _CHUNK_ELEMENTS // period))
    height = max(1, _CHUNK_ELEMENTS // (width * period)) * period
    for top in range(0, S, height):
        for left in range(0, N, width):
            yield slice(top, top + height), slice(left, left + width)
