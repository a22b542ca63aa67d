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

import torch
from torch import Tensor

from llmcompressor.errors import InputError
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.scales import ScaleFormat, scales_from_range

__all__ = ["ShrinkSearch", "search_range"]

_CHUNK_ELEMENTS = 1 << 18
_FRACTIONS_AT_ONCE = 5


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
    if values_SN.numel() == 0:
        raise InputError("There are no values to search a range for.", "Observe some first.")
    if importance_PN is not None:
        _check_importance(importance_PN, values_SN)
    plain = scale_format is ScaleFormat.E4M3
    rounding = _Rounding(grid, ScaleFormat.PLAIN if plain else scale_format, scale_dtype)
    lowest_S, highest_S = values_SN.amin(1) * search.expand, values_SN.amax(1) * search.expand
    best = _Best(lowest_S, highest_S)
    fractions = search.fractions()
    for start in range(0, len(fractions), _FRACTIONS_AT_ONCE):
        tried = fractions[start : start + _FRACTIONS_AT_ONCE]
        low_KS = torch.stack([p * lowest_S for p in tried])
        high_KS = torch.stack([p * highest_S for p in tried])
        error_KS = _errors(
            values_SN, low_KS, high_KS, rounding, norm=search.norm, importance_PN=importance_PN
        )
        if not best.take(low_KS, high_KS, error_KS, search.patience):
            break
    return best.low_S, best.high_S


@dataclass(frozen=True)
class _Rounding:
    grid: Grid
    scale_format: ScaleFormat
    scale_dtype: torch.dtype | None

    def scales(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        scale, zero = scales_from_range(
            low,
            high,
            self.grid,
            scale_format=self.scale_format,
            scale_dtype=self.scale_dtype,
            stored_in=low.dtype,
        )
        return scale, None if self.grid.symmetric else zero


class _Best:
    """The best range of each cell so far, and the number of tries since an improvement."""

    def __init__(self, lowest_S: Tensor, highest_S: Tensor) -> None:
        self.low_S, self.high_S = lowest_S.clone(), highest_S.clone()
        self._error_S = torch.full_like(lowest_S, torch.inf, dtype=torch.float32)
        self._idle = 0

    def take(self, low_KS: Tensor, high_KS: Tensor, error_KS: Tensor, patience: int) -> bool:
        """Compare fractions one after another; return False once patience has run out."""
        counted = self._counted(error_KS, patience) if patience else len(error_KS)
        for low_S, high_S, error_S in zip(
            low_KS[:counted], high_KS[:counted], error_KS[:counted], strict=True
        ):
            better_S = error_S < self._error_S
            self._error_S = torch.where(better_S, error_S, self._error_S)
            self.low_S = torch.where(better_S, low_S, self.low_S)
            self.high_S = torch.where(better_S, high_S, self.high_S)
        return not patience or self._idle < patience

    def _counted(self, error_KS: Tensor, patience: int) -> int:
        """Number of fractions before patience runs out, with one device synchronization."""
        least_S, improves = self._error_S, []
        for error_S in error_KS:
            improves.append((error_S < least_S).any())
            least_S = torch.fmin(least_S, error_S)  # of a number and NaN the number
        for number, improved in enumerate(torch.stack(improves).tolist()):
            self._idle = 0 if improved else self._idle + 1
            if self._idle >= patience:
                return number
        return len(error_KS)


def _errors(
    values_SN: Tensor,
    low_KS: Tensor,
    high_KS: Tensor,
    rounding: _Rounding,
    *,
    norm: float,
    importance_PN: Tensor | None,
) -> Tensor:
    """Sum of weighted errors of each cell [K, S] for each of K ranges, in float32.

    Chunks are small enough to stay in a cache while all K ranges are tried on them, as many at once
    as make up a chunk.
    """
    scale_KS, zero_KS = rounding.scales(low_KS, high_KS)
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
            every = part.expand(len(scale), *part.shape)
            rounded = rounding.grid.fake_quantize(every, scale, zero)
            loss = _power_(rounded.to(torch.float32).sub_(exact).abs_(), norm)
            if weight is not None:
                loss.unflatten(1, (-1, period)).mul_(weight)  # type: ignore[no-untyped-call]
            error_KS[some, rows] += loss.sum(-1)
    return error_KS


def _power_(x: Tensor, norm: float) -> Tensor:
    """``x ** norm`` in place for x not negative; ``pow`` is slow at fractional exponents."""
    return x.pow_(norm) if float(norm).is_integer() else x.log2_().mul_(norm).exp2_()


def _chunks(S: int, N: int, period: int) -> Iterator[tuple[slice, slice]]:
    """Rectangles of about the chunk size that cover [S, N], whole periods of rows high."""
    width = min(N, max(1, _CHUNK_ELEMENTS // period))
    height = max(1, _CHUNK_ELEMENTS // (width * period)) * period
    for top in range(0, S, height):
        for left in range(0, N, width):
            yield slice(top, top + height), slice(left, left + width)


def _check_importance(importance_PN: Tensor, values_SN: Tensor) -> None:
    S, N = values_SN.shape
    if importance_PN.ndim != 2 or importance_PN.shape[1] != N or S % importance_PN.shape[0]:
        raise InputError(
            f"Importance of shape {tuple(importance_PN.shape)} does not fit cells [{S}, {N}].",
            f"Give rows of {N} whose number divides {S}.",
        )
