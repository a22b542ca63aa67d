# SPDX-License-Identifier: Apache-2.0
r"""Distance of a decoded weight from the original, and what of it rounding explains.

Rounded to the nearest, each value is within half a step of its code. After a solver that does not
hold, but what it changes is noise to the weight: with w a row, or a cell with one scale, and d what
it decodes to, the slope :math:`d \cdot w / w \cdot w` is one, with a deviation of about
:math:`|d - w| / (|w| \sqrt n)` for n values. A scale that is not that of its codes moves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompressor.verification.expected import Part
from llmcompressor.verification.scheme import Args


class _Floats(NamedTuple):
    """Bits of mantissa, the least step and the largest value of a grid of floats."""

    mantissa: int
    least: float
    largest: float


_FLOATS = {
    4: _Floats(1, 0.5, 6.0),
    6: _Floats(3, 0.125, 7.5),
    8: _Floats(3, 2.0**-9, 448.0),
}
"""By their bits."""
_LEAST_COSINE, _MOST_ERROR = 0.4, 1.2
_LEAST_ROW_COSINE = 0.1
_MOST_SLOPE, _MOST_CELL_SLOPE = 1.4, 1.6
_LEAST_SLOPE = 0.6
"""Clipping makes slopes smaller, those of cells more than those of rows."""
_DEVIATIONS, _SPREAD, _MULTIPLE = 8.0, 4.0, 4.0
_EXACT = 1e-3
"""Relative error that rounding of scales, or of what was rounded, makes at least."""


@dataclass(frozen=True)
class WeightError:
    """Distance of a decoded weight from the original.

    Attributes:
        module: the module.
        relative: Frobenius norm of the difference over that of the original.
        cosine: of the two as vectors.
    """

    module: str
    relative: float
    cosine: float


class _Cells(NamedTuple):
    """Sums over cells [rows, cells] of a weight, and the values of each.

    ``rounding`` is what rounding to the nearest adds to ``error``.
    """

    source: Tensor
    shift: Tensor
    error: Tensor
    rounding: Tensor
    size: int

    @classmethod
    def of(cls, original: Tensor, difference: Tensor, steps: Tensor, shape: torch.Size) -> _Cells:
        pairs = (
            (original, original),
            (original, difference),
            (difference, difference),
            (steps, steps / 12),
        )
        sums = ((one * other).reshape(shape).sum(dim=2) for one, other in pairs)
        source, shift, error, rounding = sums
        return cls(source, shift, error, rounding, shape[2])

    def joined(self) -> _Cells:
        """A row as one cell."""
        source, shift, error, rounding = (one.sum(1, keepdim=True) for one in self[:4])
        return _Cells(source, shift, error, rounding, self.size * self.source.shape[1])

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Slopes and their noise; of one where codes are too few steps wide to tell."""
        square = self.source.clamp_min(1e-30)
        slope = 1 + self.shift / square
        rest = (self.error - self.shift.square() / square).clamp_min(0)
        noise = ((rest / square).sqrt() + _EXACT) / sqrt(self.size)
        decoded = self.source + 2 * self.shift + self.error
        tells = (self.source > 1e-12) & (decoded > 2 * self.rounding)
        return torch.where(tells, slope, 1.0), noise


@dataclass
class Closeness:
    """Sums over a weight, from which its error follows.

    Attributes:
        args: the arguments of the weight.
        with_slopes: whether slopes are looked at.
    """

    args: Args
    with_slopes: bool = False
    error: float = 0.0
    source: float = 0.0
    decoded: float = 0.0
    product: float = 0.0
    rounding: float = 0.0
    beyond: int = 0
    worst: float = 0.0
    bad_rows: list[int] = field(default_factory=list)
    odd_rows: dict[int, float] = field(default_factory=dict)
    odd_cells: dict[int, float] = field(default_factory=dict)
    upward: float = 0.0
    cells: int = 0

    def add(self, part: Part, original: Tensor) -> None:
        """Add up what the error needs: three products per row, from which all others follow.

        Each row is taken in a unit of about its largest value: the squares of what is very small,
        or very large, are no float32.
        """
        difference = (part.units * part.scale).sub_(original).flatten(1)
        flat = original.flatten(1)
        _, exponents = torch.frexp(flat.abs().amax(dim=1, keepdim=True))
        exponents.clamp_(-120, 120)  # powers of two that a float32 has
        difference, flat = (torch.ldexp(one, -exponents) for one in (difference, flat))
        error = torch.linalg.vector_norm(difference, dim=1).double().square()
        source = torch.linalg.vector_norm(flat, dim=1).double().square()
        shift = (difference * flat).sum(dim=1).double()
        product, decoded = source + shift, (source + 2 * shift + error).clamp_min(0)
        units = torch.ldexp(torch.ones(len(flat), dtype=torch.float64), 2 * exponents[:, 0])
        self.error += float((error * units).sum())
        self.source += float((source * units).sum())
        self.decoded += float((decoded * units).sum())
        self.product += float((product * units).sum())
        cosine = product / (source.sqrt() * decoded.sqrt()).clamp_min(1e-30)
        # a row that is small beside those it shares a scale with is nothing but zeros
        half = 0.5 if self.args.kind == "int" else _FLOATS[self.args.bits].least / 2
        is_small = (original.abs() <= 1.01 * half * part.scale.abs()) & (part.units == 0)
        bad = (source > 0) & ~(cosine > _LEAST_ROW_COSINE) & ~is_small.flatten(1).all(dim=1)
        if bool(bad.any()):
            self.bad_rows += [part.start + int(row) for row in bad.nonzero()]
        if self.with_slopes:
            step = 1.0 if self.args.kind == "int" else 2 * half_steps(part.units, self.args.bits)
            steps = torch.ldexp((step * part.scale).expand_as(part.units).flatten(1), -exponents)
            of_cells = _Cells.of(flat, difference, steps, part.units.shape)
            self.rounding += float((of_cells.rounding.sum(1).double() * units).sum())
            self._add_slopes(part.start, of_cells)

    def _add_slopes(self, start: int, cells: _Cells) -> None:
        """Rows and cells that are larger or smaller than the original, beyond noise."""
        slope, noise = cells.slopes()
        row_slope, row_noise = (one[:, 0] for one in cells.joined().slopes())
        apart = _DEVIATIONS * row_noise
        odd = (row_slope > _MOST_SLOPE + apart) | (row_slope < _LEAST_SLOPE - apart)
        for row in odd.nonzero()[:, 0].tolist():
            self.odd_rows[start + row] = float(row_slope[row])
        odd_cells = slope > _MOST_CELL_SLOPE + _DEVIATIONS * noise
        for row, cell in odd_cells.nonzero().tolist():
            self.odd_cells.setdefault(start + row, float(slope[row, cell]))
        self.upward += float(((slope - 1).clamp_min(0) / noise).square().sum())
        self.cells += slope.numel()

    def bound(self, part: Part, original: Tensor, unit: float, apart: float) -> None:
        """Count values that are further off than rounding to the nearest allows.

        A value is within half a step of its code. Beyond the ends of the grid it may be anywhere:
        there its code is the last one. The quotient, and its sum with a zero point, may have been
        rounded to the dtype of the weight before; each adds ``unit`` of its size. So may the value
        of the code, which codes are found of once more: where it is tiny in that dtype it may move
        by ``apart``.
        """
        args = self.args
        tiny = torch.finfo(torch.float32).tiny
        units, scale = part.units, torch.where(part.scale.abs() < tiny, tiny, part.scale)
        quotient = original / scale
        off = (quotient - units).abs_()
        size = units.abs()
        if part.zero is not None:
            size = size.add_(part.zero.abs()).mul_(2)
        half: Tensor | float = 0.5 if args.kind == "int" else half_steps(units, args.bits)
        allowed = size.add_(1).mul_(unit).add_(half)
        if apart:
            allowed += apart / scale.abs()
        beyond = off > allowed
        if not bool(beyond.any()):
            return
        if args.kind == "int":
            zero = part.zero if part.zero is not None else torch.zeros(())
            low, high = -(2.0 ** (args.bits - 1)) - zero, 2.0 ** (args.bits - 1) - 1 - zero
        else:
            high = torch.tensor(_FLOATS[args.bits].largest)
            low = -high
        clipped = ((units >= high) & (quotient > units)) | ((units <= low) & (quotient < units))
        beyond &= ~clipped
        count = int(beyond.sum())
        if count:
            self.beyond += count
            self.worst = max(self.worst, float((off / allowed)[beyond].max()))

    def of(self, module: str) -> WeightError:
        """The error of the weight."""
        if not self.source:
            return WeightError(module, 0.0 if not self.error else float("inf"), 1.0)
        norm = sqrt(self.source) * sqrt(self.decoded)
        return WeightError(
            module,
            sqrt(self.error / self.source),
            self.product / norm if norm else float("nan"),
        )

    @property
    def spread(self) -> float:
        """By how many deviations of their noise slopes of cells are above one."""
        return sqrt(self.upward / self.cells) if self.cells else 0.0

    @property
    def of_rounding(self) -> float:
        """The error as a multiple of that of rounding to the nearest."""
        return sqrt(self.error / self.rounding) if self.rounding else 0.0

    def complaint(self, module: str, *, may_be_scaled: bool) -> str:
        """What is wrong; empty if nothing is.

        Args:
            module: the module.
            may_be_scaled: all of it may have been made larger or smaller.
        """
        found = self.of(module)
        # where it was scaled the error is large, and nothing is lost
        is_far = found.relative > _MOST_ERROR and not (may_be_scaled or self.with_slopes)
        if found.cosine < _LEAST_COSINE or is_far:
            return (
                f"Decoded it has nothing of the original: relative error {found.relative:.3g}, "
                f"cosine {found.cosine:.3g}."
            )
        if self.bad_rows:
            return (
                f"{len(self.bad_rows)} of its rows have nothing of the original, such as row "
                f"{self.bad_rows[0]}."
            )
        for odd, what in ((self.odd_rows, "of its rows"), (self.odd_cells, "rows in some columns")):
            for row, slope in odd.items():
                return (
                    f"{len(odd)} {what} are not as large as the original's, such as row {row} with "
                    f"{slope:.3g} times its size: scales are not those of their codes."
                )
        return ""


def outliers(seen: Mapping[str, Closeness]) -> Iterator[tuple[str, str, bool]]:
    """Modules that differ from the others by more than noise: name, sentence, is it an error."""
    several = [one for one in seen.values() if one.cells]
    if not several:
        return
    usual = median(one.spread for one in several)
    common = median(one.of_rounding for one in several)
    for module, one in seen.items():
        if one.spread > _SPREAD * max(usual, 1.0):
            yield (
                module,
                f"Its scales are not those of their codes: cells are larger than the original's by "
                f"{one.spread:.3g} times their noise, and by {usual:.2g} in other modules.",
                True,
            )
        elif one.of_rounding > _MULTIPLE * max(common, 1.0):
            yield (
                module,
                f"Its error is {one.of_rounding:.3g} times that of rounding to the nearest, and "
                f"{common:.2g} times in other modules.",
                False,
            )


def apart(dtype: torch.dtype | None) -> float:
    """The distance of the smallest numbers of a dtype, below which it tells none apart.

    >>> apart(torch.float16) == 2.0**-24
    True
    """
    return 0.0 if dtype is None else torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def half_steps(units: Tensor, bits: int) -> Tensor:
    """Half the wider of the two steps beside a float of the grid.

    >>> half_steps(torch.tensor([0.0, 1.5, -2.0, 6.0]), 4)
    tensor([0.2500, 0.2500, 0.5000, 1.0000])
    """
    # without sign and mantissa a float32 is the power of two at or below it
    power = units.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return power.mul_(2.0 ** -(_FLOATS[bits].mantissa + 1)).clamp_min_(_FLOATS[bits].least / 2)
