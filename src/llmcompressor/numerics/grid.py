# SPDX-License-Identifier: Apache-2.0
"""Number grids of quantized values, and rounding to them.

With scale s and zero point z (absent on symmetric grids), for grid G with ends ``qmin``, ``qmax``::

    code(x)    q  = round_G(clamp(x / s + z, qmin, qmax))
    value(q)   x' = (q - z) * s

======================  ==================================  ======================
grid                    values                              ends
======================  ==================================  ======================
``int``, b bits         all integers                        -2^(b-1), 2^(b-1) - 1
``float``, 8 bits       e4m3fn (OCP, no infinity)           -448, 448
``float``, 6 bits       e2m3: 0, .125, …, 6.5, 7, 7.5       -7.5, 7.5
``float``, 4 bits       e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6     -6, 6
======================  ==================================  ======================

Ties go to the even code. Each arithmetic step rounds to the dtype of its operands, in the order
written above: the loaders of a checkpoint do the same, so results agree with theirs in every bit.
For grids that 16-bit floats do not resolve (integers of more than 8 bits), x / s + z is in float32.

x has any shape and a floating dtype. The effective scale and the zero point, of any dtype or
``None``, broadcast to it. Results are new tensors of the shape of x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmcompressor.errors import InputError

_HALF_DTYPES = (torch.bfloat16, torch.float16)
_MOST_BITS_OF_HALVES = 8


class FloatLayout(NamedTuple):
    """The bit layout of a floating dtype: its integer dtype, mantissa bits, and exponent bits."""

    integer: torch.dtype
    mantissa: int
    exponent_mask: int


_LAYOUTS = {
    torch.bfloat16: FloatLayout(torch.int16, 7, 0x7F80),
    torch.float16: FloatLayout(torch.int16, 10, 0x7C00),
    torch.float32: FloatLayout(torch.int32, 23, 0x7F80_0000),
    torch.float64: FloatLayout(torch.int64, 52, 0x7FF0_0000_0000_0000),
}


class SmallFloat(NamedTuple):
    """The members of a floating-point grid.

    ``smallest`` is the smallest normal member, a power of two, below which spacing is even.
    """

    mantissa: int
    smallest: float
    largest: float


_SMALL_FLOATS = {
    4: SmallFloat(1, 1.0, 6.0),
    6: SmallFloat(3, 1.0, 7.5),
    8: SmallFloat(3, 2.0**-6, 448.0),
}


def float_layout(dtype: torch.dtype) -> FloatLayout:
    """The bit layout of ``dtype``.

    Raises:
        InputError: ``dtype`` is not bfloat16, float16, float32 or float64.
    """
    if dtype not in _LAYOUTS:
        raise InputError(
            f"Values of {dtype} cannot be rounded to a grid.",
            "Convert them to bfloat16, float16, float32 or float64.",
        )
    return _LAYOUTS[dtype]


@dataclass(frozen=True)
class Grid:
    """A finite set of numbers with evenly or exponentially spaced members.

    Args:
        kind: ``"int"`` or ``"float"``.
        bits: 1 to 16 for integers; 8 (e4m3fn), 6 (e2m3) or 4 (e2m1) for floats.
        symmetric: whether values are quantized without a zero point.

    >>> Grid("int", 4).qmin, Grid("int", 4).qmax
    (-8.0, 7.0)
    >>> Grid("float", 4).round(torch.tensor([0.25, 0.75, 2.5, 5.0, -9.0])).tolist()
    [0.0, 1.0, 2.0, 4.0, -6.0]
    >>> Grid("int", 8).fake_quantize(torch.tensor([0.26, 99.0]), torch.tensor(0.5)).tolist()
    [0.5, 63.5]
    """

    kind: Literal["int", "float"]
    bits: int
    symmetric: bool = True

    def __post_init__(self) -> None:
        allowed = range(1, 17) if self.kind == "int" else _SMALL_FLOATS
        if self.kind not in ("int", "float") or self.bits not in allowed:
            raise InputError(
                f"There is no grid of {self.bits}-bit {self.kind} values.",
                "Use int with 1 to 16 bits, or float with 4, 6 or 8 bits.",
            )
        if self.kind == "float" and self.bits != 8 and not self.symmetric:
            raise InputError(
                f"{self.bits}-bit floats have no zero point.", "Set symmetric to true."
            )

    @property
    def floats(self) -> SmallFloat | None:
        """The spacing of the members; ``None`` for integers."""
        return _SMALL_FLOATS[self.bits] if self.kind == "float" else None

    @property
    def qmin(self) -> float:
        """The smallest member."""
        if self.kind == "int":
            return -(2.0 ** (self.bits - 1))
        return -self.qmax

    @property
    def qmax(self) -> float:
        """The largest member."""
        if self.kind == "int":
            return 2.0 ** (self.bits - 1) - 1
        return _SMALL_FLOATS[self.bits].largest

    @property
    def last_step(self) -> float:
        """The distance between the two largest members."""
        if self.floats is None:
            return 1.0
        return 2.0 ** (math.floor(math.log2(self.qmax)) - self.floats.mantissa)

    @property
    def needs_float32(self) -> bool:
        """True if 16-bit floats do not resolve all members, such as 32767 and 32768.

        Values are then divided in float32: loaders never divide a weight, they only multiply codes.
        """
        return self.kind == "int" and self.bits > _MOST_BITS_OF_HALVES

    def round(self, x: Tensor) -> Tensor:
        """The member nearest to each x, already divided by its scale.

        Those beyond the ends are clamped; NaN stays NaN.
        """
        return self.round_(x.clamp(self.qmin, self.qmax))

    def quantize(self, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """Codes q = round(clamp(x / scale + zero)), held as floating values.

        In the dtype that ``x / scale`` promotes to; of 16-bit floats on a fine grid, float32.
        """
        return self.round_(self.limit(x, scale, zero))

    def limit(self, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """Return x / scale + zero, clamped to the grid but not yet rounded."""
        return self.quotients(x, scale, zero).clamp_(self.qmin, self.qmax)

    def quotients(self, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """The quotients x / scale + zero, neither clamped nor rounded.

        In float32 if the dtype of ``x`` does not resolve the codes (:attr:`needs_float32`).
        """
        if self.needs_float32 and x.dtype in _HALF_DTYPES:
            x, scale = x.float(), scale.float()
        # converted first: dividing mixed dtypes is ten times as slow on a CPU
        wide = x.to(torch.result_type(x, scale))
        is_own = wide is not x and _fits(scale, x)
        quotients = wide.div_(scale) if is_own else torch.div(wide, scale)
        if zero is not None:
            quotients.add_(zero.to(x.dtype))
        return quotients

    def dequantize(self, q: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """Values x' = (q - zero) * scale of codes of any dtype, in the dtype of ``scale``."""
        values = q.to(scale.dtype)
        if zero is None:
            return values * scale
        return (values - zero.to(scale.dtype)).mul_(scale)

    def fake_quantize(self, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """Quantize and dequantize x, in the dtype of ``x``.

        One temporary of the size of ``x`` (two on float grids), which becomes the result.
        """
        values = self.quantize(x, scale, zero).to(scale.dtype)
        if zero is not None:
            values.sub_(zero.to(scale.dtype))
        return values.mul_(scale).to(x.dtype)

    def round_(self, x: Tensor) -> Tensor:
        """Round ``x``, within the ends or NaN, in place; ``x`` must not be used again.

        Members of floats are spaced by 2^-mantissa times the power of two at or below abs(x), and
        evenly under the smallest normal member. So x / spacing is exact, its last bit is that of
        the code, and one half-to-even rounding of integers does it.
        """
        if self.floats is None:
            return x.round_()
        if self.bits == 4:
            x.add_(0.0)  # loaders treat the sign of -0.0 as 0; rounding to zero keeps the sign
        spacing = power_of_two(x).clamp_(min=self.floats.smallest).mul_(2.0**-self.floats.mantissa)
        return x.div_(spacing).round_().mul_(spacing)


def power_of_two(x: Tensor) -> Tensor:
    """The power of two at or below the absolute value of each x: its exponent field alone."""
    layout = float_layout(x.dtype)
    return x.view(layout.integer).bitwise_and(layout.exponent_mask).view(x.dtype)


def _fits(scale: Tensor, x: Tensor) -> bool:
    """Return True if ``scale`` broadcasts to ``x`` without enlarging it."""
    last = x.shape[max(x.ndim - scale.ndim, 0) :]
    pairs = zip(scale.shape, last, strict=False)
    return scale.ndim <= x.ndim and all(own in (1, of) for own, of in pairs)
