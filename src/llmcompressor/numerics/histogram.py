# SPDX-License-Identifier: Apache-2.0
"""Histograms of observed values, and clipping ranges computed from them.

Bin j of a histogram covers [j w, (j + 1) w) with w a power of two, the same lattice for whatever
data. When a value does not fit, w doubles and neighbours merge: j becomes floor(j / 2). So counts
are exact, and do not depend on the order of the data nor on how it was split: merging the
histograms of two halves gives the histogram of the whole.

Shapes: S scales (one histogram each), N values, B bins on each side of zero (2 B in all),
L clipping ranges that are tried.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.errors import InputError
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.range_search import BestSoFar
from llmcompressor.numerics.scales import scales_from_range

_LEAST_EXPONENT = -126
_CHUNK_ELEMENTS = 1 << 22
_RANGES_TRIED = 160
_CELLS_AT_ONCE = 2**21
"""Bins of so many scales together are rounded at a time."""
_FEW_RANGES = 2
_LEAST_FRACTION = 2.0**-7
_FLOOR_OF_MASS = 1e-4


_tried = ContextVar("ranges tried", default=_RANGES_TRIED)


@contextmanager
def try_few_ranges() -> Iterator[None]:
    """Context manager: try only a few ranges, with the memory of the full search in less time.

    The result is not the best range; this is for measuring the memory of a search.
    """
    before = _tried.set(_FEW_RANGES)
    try:
        yield
    finally:
        _tried.reset(before)


@dataclass(frozen=True)
class Histogram:
    """Counts of values per scale.

    Attributes:
        counts: int64 [S, 2 B]; column B + j counts values in [j w, (j + 1) w).
        exponent: int64 [S]; w = 2^exponent.
        low: float32 [S], the least value seen.
        high: float32 [S], the greatest value seen.
    """

    counts: Tensor
    exponent: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, values_SN: Tensor, bins: int = 2048) -> Histogram:
        """The histogram of each row of finite values, floating dtype, not empty.

        At least half of the ``bins`` on each side of zero are in use on the side with the largest
        value.

        >>> Histogram.of(torch.tensor([[0.0, 1.0, 2.5, -1.0]]), bins=4).counts.tolist()
        [[0, 0, 0, 1, 1, 1, 1, 0]]
        """
        if values_SN.numel() == 0 or bins < 2:
            raise InputError(
                f"No histogram of {tuple(values_SN.shape)} values in {bins} bins can be made.",
                "Give at least one value per scale and two bins.",
            )
        low_S, high_S = values_SN.amin(1).float(), values_SN.amax(1).float()
        amax_S = torch.maximum(-low_S, high_S)
        # the smallest exponents with amax < bins * 2^exponent: the mantissa is in [0.5, 1), so
        # 2^exponent is strictly above amax / bins; 2^-126 is the finest lattice
        exponent_S = torch.frexp(amax_S / bins).exponent.long()
        exponent_S = exponent_S.masked_fill(amax_S == 0, _LEAST_EXPONENT).clamp(min=_LEAST_EXPONENT)
        return cls(_count(values_SN, exponent_S, bins), exponent_S, low_S, high_S)

    @property
    def bins(self) -> int:
        """Bins on each side of zero."""
        return self.counts.shape[1] // 2

    @property
    def width(self) -> Tensor:
        """Width of the bins of each scale, float32 [S]."""
        return torch.ldexp(torch.ones_like(self.low), self.exponent)

    @property
    def centers(self) -> Tensor:
        """The middle of each bin, float32 [S, 2 B]."""
        index = torch.arange(-self.bins, self.bins, device=self.low.device)
        return (index + 0.5) * self.width[:, None]

    def add(self, values_SN: Tensor) -> Histogram:
        """The histogram with further values, [S, N]."""
        return self.merge(Histogram.of(values_SN, self.bins))

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of the values of both."""
        if self.counts.shape != other.counts.shape:
            raise InputError(
                f"Histograms of {tuple(self.counts.shape)} and "
                f"{tuple(other.counts.shape)} cannot be merged.",
                "Give them the same scales and bins.",
            )
        exponent_S = torch.maximum(self.exponent, other.exponent)
        return Histogram(
            self._coarsened(exponent_S) + other._coarsened(exponent_S),
            exponent_S,
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
        )

    def without_zeros(self, number_S: Tensor) -> Histogram:
        """The histogram without ``number_S`` padding zeros, int64 [S]."""
        counts_SB = self.counts.clone()
        counts_SB[:, self.bins] -= number_S
        return dataclasses.replace(self, counts=counts_SB)

    def _coarsened(self, exponent_S: Tensor) -> Tensor:
        """Counts on the lattice of ``exponent_S``, which is at least as coarse as this one's."""
        shift_S = (exponent_S - self.exponent).clamp(max=62)
        if not bool(shift_S.any()):
            return self.counts
        index = torch.arange(-self.bins, self.bins, device=self.counts.device)
        target_SB = (index >> shift_S[:, None]) + self.bins
        return torch.zeros_like(self.counts).scatter_add_(1, target_SB, self.counts)


_Error = Callable[[Histogram, Tensor, Tensor, Tensor], Tensor]


def percentile_range(
    histogram: Histogram, percentile: float, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """The range that contains ``percentile`` percent of the values, float32 [S] each.

    A symmetric one has the same bound on both sides, for a percentile of absolute values; otherwise
    half of the rest is cut off at each end. 100 gives the observed extremes.

    >>> h = Histogram.of(torch.arange(-50.0, 50.0)[None], bins=64)
    >>> percentile_range(h, 90, symmetric=True)
    (tensor([-45.]), tensor([45.]))
    """
    if not 0 < percentile <= 100:
        raise InputError(f"The percentile is {percentile}.", "Give a number above 0, up to 100.")
    if percentile == 100:
        return histogram.low, histogram.high
    counts_SB = histogram.counts.double()
    B = histogram.bins
    if symmetric:
        magnitude_SB = counts_SB[:, B:] + counts_SB[:, :B].flip(1)
        bound_S = _quantile(magnitude_SB, percentile / 100) * histogram.width
        low_S, high_S = -bound_S, bound_S
    else:
        tail = (1 - percentile / 100) / 2
        low_S = (_quantile(counts_SB, tail) - B) * histogram.width
        high_S = (_quantile(counts_SB, 1 - tail) - B) * histogram.width
    return torch.maximum(low_S, histogram.low), torch.minimum(high_S, histogram.high)


def mse_range(histogram: Histogram, grid: Grid) -> tuple[Tensor, Tensor]:
    """The clipping range with the least mean square rounding error on a grid, float32 [S] each.

    t* = argmin_t sum_b n_b (c_b - Q_t(c_b))^2 over the bins' counts n and centres c, where t
    bounds absolute values.
    """

    def error(some: Histogram, rounded_SB: Tensor, *_: Tensor) -> Tensor:
        return (some.counts * (some.centers - rounded_SB).square()).sum(1)

    return _best_range(histogram, grid, error, least=_LEAST_FRACTION)


def entropy_range(histogram: Histogram, grid: Grid) -> tuple[Tensor, Tensor]:
    """The clipping range with the least KL divergence between original and rounded values.

    As in NVIDIA's entropy calibration (Migacz, 2017): P is the histogram within the range, with all
    counts beyond it moved to the outermost bins; Q spreads the counts of each code (within the
    range) evenly over the non-empty bins that round to it; the range, float32 [S] each, minimizes
    KL(P || Q) = sum_b P_b log(P_b / Q_b). Any grid is supported, not only integers.
    """
    least = min(0.5, 2.0**grid.bits / histogram.bins)
    return _best_range(histogram, grid, _divergence, least=least)


def _best_range(
    histogram: Histogram, grid: Grid, error: _Error, *, least: float
) -> tuple[Tensor, Tensor]:
    """The clipping range with the least ``error(histogram, rounded_SB, low_S, high_S)``.

    Bounds p max(-a, b) on absolute values are tried, p from 1 down to ``least``, for values from a
    to b. An outlier on one side thus costs nothing on the other. Scales are processed in parts, so
    that memory is bounded.
    """
    rows = max(_CELLS_AT_ONCE // (2 * histogram.bins), 1)
    every = (histogram.counts, histogram.exponent, histogram.low, histogram.high)
    found = []
    for part in zip(*(torch.split(one, rows) for one in every), strict=True):
        some = Histogram(*part)
        floor_S, ceiling_S = some.low.clamp(max=0.0), some.high.clamp(min=0.0)
        amax_S = torch.maximum(-floor_S, ceiling_S)
        worst_S = torch.full_like(amax_S, torch.inf, dtype=torch.float64)
        best = BestSoFar(worst_S, floor_S, ceiling_S)
        for p in torch.logspace(0.0, math.log2(least), _tried.get(), base=2.0).tolist():
            low_S = torch.maximum(-p * amax_S, floor_S)
            high_S = torch.minimum(p * amax_S, ceiling_S)
            scale_S, zero_S = scales_from_range(low_S, high_S, grid)
            zero = None if grid.symmetric else zero_S[:, None]
            rounded_SB = grid.fake_quantize(some.centers, scale_S[:, None], zero)
            best.take(error(some, rounded_SB, low_S, high_S).double(), low_S, high_S)
        found.append(best.candidate_S)
    low_S, high_S = (torch.cat(each) for each in zip(*found, strict=True))
    return low_S, high_S


def _divergence(histogram: Histogram, rounded_SB: Tensor, low_S: Tensor, high_S: Tensor) -> Tensor:
    """KL(P || Q) of each scale, float64 [S]; see :func:`entropy_range`."""
    counts_SB, width_S = histogram.counts.double(), histogram.width
    B = histogram.bins
    index_B = torch.arange(-B, B, device=counts_SB.device)
    first_S1 = (low_S / width_S).floor().clamp(min=-B)[:, None]
    last_S1 = (high_S / width_S).floor().clamp(max=B - 1)[:, None]
    within_SB = (index_B >= first_S1) & (index_B <= last_S1)

    inner_SB = counts_SB * within_SB
    moved_SB = torch.minimum(torch.maximum(index_B.float(), first_S1), last_S1).long() + B
    P_SB = torch.zeros_like(counts_SB).scatter_add_(1, moved_SB, counts_SB)

    # rounding is monotone, so the bins of one code are neighbours
    code_SB = (rounded_SB.diff(dim=1) != 0).cumsum(1)
    code_SB = torch.cat([torch.zeros_like(code_SB[:, :1]), code_SB], 1)
    filled_SB = (inner_SB > 0).double()
    of_code = torch.zeros_like(counts_SB)
    mass = of_code.scatter_add(1, code_SB, inner_SB).gather(1, code_SB)
    number = of_code.scatter_add(1, code_SB, filled_SB).gather(1, code_SB)
    Q_SB = filled_SB * mass / number.clamp(min=1.0)

    P_SB = P_SB / P_SB.sum(1, keepdim=True)
    Q_SB = Q_SB / Q_SB.sum(1, keepdim=True).clamp(min=1.0)
    # smoothing: an empty outermost bin would make the divergence of any clipping infinite
    even_SB = within_SB / within_SB.sum(1, keepdim=True)
    Q_SB = torch.lerp(Q_SB, even_SB.double(), _FLOOR_OF_MASS)
    divergence_S: Tensor = torch.special.xlogy(P_SB, P_SB / Q_SB.clamp(min=1e-300)).sum(1)
    return divergence_S


def _count(values_SN: Tensor, exponent_S: Tensor, bins: int) -> Tensor:
    """Counts [S, 2 B] of ``values_SN`` on the lattice of ``exponent_S``."""
    S, N = values_SN.shape
    offset_S1 = torch.arange(S, device=values_SN.device)[:, None] * (2 * bins) + bins
    total = torch.zeros(S * 2 * bins, dtype=torch.int64, device=values_SN.device)
    step = max(1, _CHUNK_ELEMENTS // S)
    for start in range(0, N, step):
        part = values_SN[:, start : start + step].float()
        index = torch.ldexp(part, -exponent_S[:, None]).floor_().long()
        # a negative value that is tiny on this lattice must not underflow to zero
        index = index.where((index != 0) | (part >= 0), -1).add_(offset_S1)
        total += torch.bincount(index.flatten(), minlength=len(total))
    return total.view(S, 2 * bins)


def _quantile(counts_SB: Tensor, level: float) -> Tensor:
    """Position, in bins from the left edge, where cumulated counts reach ``level``; float32 [S]."""
    cumulated_SB = counts_SB.cumsum(1)
    wanted_S1 = level * cumulated_SB[:, -1:]
    bin_S1 = torch.searchsorted(cumulated_SB, wanted_S1).clamp(max=counts_SB.shape[1] - 1)
    inside_S1 = counts_SB.gather(1, bin_S1)
    missing_S1 = wanted_S1 - (cumulated_SB.gather(1, bin_S1) - inside_S1)
    share_S1 = (missing_S1 / inside_S1.clamp(min=math.ulp(1.0))).clamp(0.0, 1.0)
    place_S: Tensor = (bin_S1 + share_S1)[:, 0].float()
    return place_S
