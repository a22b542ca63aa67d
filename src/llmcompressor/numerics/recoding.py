# SPDX-License-Identifier: Apache-2.0
"""Recovery of the codes of a rounded weight where division alone does not find them.

A rounded weight w' = (q - z) s went through the dtype of its scale, step by step: q and z were
rounded to it, then their difference, then the product. If a code needs more bits than that dtype
has, w' / s + z is close to q, and the code nearest to it may decode to another value. With
d = q - z as the loader computes it, w' / s is within one unit of the last place of d: some number
of the dtype near w' / s is d, and d + z, rounded, is a code that the loader decodes to w'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.numerics.grid import Grid, float_layout

__all__ = ["needs_recoding", "recoded"]

_STEPS = (0, -1, 1, -2, 2, -3, 3, -4, 4)
"""In half units of the last place: the spacing halves below a power of two."""


def needs_recoding(grid: Grid, dtype: torch.dtype) -> bool:
    """Return True if float32 division may not recover the code of a weight rounded in ``dtype``."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    if grid.kind == "float":
        return not grid.symmetric
    significand = float_layout(dtype).mantissa + 1
    return grid.bits + (not grid.symmetric) > significand


def recoded(x: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """The code of each x: the nearest one that loaders decode to x, if there is one.

    Args:
        x: rounded values, floating dtype.
        scale: effective scale, broadcastable to ``x``, in the dtype that loaders compute in.
        zero: zero point of any dtype, broadcastable to ``x``; ``None`` for none.
        grid: the grid of the codes.

    Returns:
        float32, the shape of ``x``; members of the grid.
    """
    wide = scale.float()
    codes = grid.quantize(x.float(), wide, zero)
    is_off = _is_off(codes, x, scale, zero, grid)
    if not bool(is_off.any()):
        return codes
    shift = torch.zeros_like(wide) if zero is None else zero.to(scale.dtype).float()
    middle = (x.float() / wide).to(scale.dtype)
    unit, middle = _half_unit(middle), middle.float()
    if grid.kind == "int":  # as every d is
        unit, middle = unit.clamp_(min=1.0), middle.round()
    for step in _STEPS:
        near = grid.round(middle + step * unit + shift)
        helps = is_off & ~_is_off(near, x, scale, zero, grid)
        codes = torch.where(helps, near, codes)
        is_off &= ~helps
        if not bool(is_off.any()):
            break
    return codes


def _is_off(codes: Tensor, x: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    return grid.dequantize(codes, scale, zero).to(x.dtype) != x


def _half_unit(x: Tensor) -> Tensor:
    """Half a unit of the last place of each x, in float32."""
    layout = float_layout(x.dtype)
    power = x.view(layout.integer).bitwise_and(layout.exponent_mask).view(x.dtype)
    return power.float() * 2.0 ** -(layout.mantissa + 1)
