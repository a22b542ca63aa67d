# SPDX-License-Identifier: Apache-2.0
"""Scales and zero points from ranges of values.

With a grid from ``qmin`` to ``qmax`` and a range [a, b] widened so that it contains zero::

    symmetric     s = max(-a, b) / ((qmax - qmin) / 2)
    asymmetric    s = (b - a) / (qmax - qmin),    z = round(clamp(qmin - a / s))

Scales are stored in one of three ways (:class:`ScaleFormat`). All arithmetic is done in the dtype
of the range, so that the results equal those of the checkpoint's loaders in every bit. Only if a
dtype has too few bits for a very small scale, a stored scale is rounded up (:func:`_kept`): loaders
read it from the file. Dynamic scales follow the loaders' formula there, too.
"""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor

from llmcompressor.numerics.grid import Grid, float_layout

_E4M3_LARGEST = 448.0
_E2M1_LARGEST = 6.0
_E4M3_SUBSTITUTE = 0.125
_E8M0_BIAS = 127
_HEADROOM, _FP6_HEADROOM = 2, 4
"""2 less 2^-this is the mantissa from which on the extreme of a group doubles its scale."""
_PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ScaleFormat(enum.Enum):
    """The storage format of scales.

    PLAIN: floating numbers of the weight's dtype, or of a given one.
    E4M3: 8-bit floats per group under one float32 scale per tensor (NVFP4).
    E8M0: powers of two, kept as their 8-bit biased exponents (OCP MX).
    """

    PLAIN = "plain"
    E4M3 = "e4m3"
    E8M0 = "e8m0"


def scales_from_range(
    minimum: Tensor,
    maximum: Tensor,
    grid: Grid,
    *,
    scale_format: ScaleFormat = ScaleFormat.PLAIN,
    global_scale: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_dtype: torch.dtype | None = None,
    stored_in: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The scale and zero point of each range, given by tensors of any shape and one floating dtype.

    Args:
        minimum: of each range.
        maximum: of each range.
        grid: the grid that the values will be rounded to.
        scale_format: how scales are stored; they are rounded accordingly.
        global_scale: float32, shape [1]; scales are multiplied by it before they are rounded.
        scale_dtype: for ``PLAIN``, a floating dtype that scales are rounded to.
        zero_dtype: dtype of the zero point; by default :func:`default_zero_dtype`.
        stored_in: dtype of stored parameters; ``None`` for dynamic ones, which loaders compute
            themselves, with eps in place of a vanishing scale even if the range is not empty.

    Returns:
        scale: shape of ``minimum`` (at least [1]), never zero; in ``stored_in`` if that is given,
            float32 if ``global_scale`` is, else the dtype of ``minimum``. An E8M0 scale is the
            power of two, not its exponent.
        zero_point: same shape, ``zero_dtype``; all zero on symmetric grids.

    >>> one = torch.ones(1)
    >>> scales_from_range(-one, 127.5 * one, Grid("int", 8))
    (tensor([1.]), tensor([0], dtype=torch.int8))
    >>> scales_from_range(-one, 14 * one, Grid("int", 4, symmetric=False))
    (tensor([1.]), tensor([-7], dtype=torch.int8))
    """
    minimum, maximum = minimum.clamp(max=0.0), maximum.clamp(min=0.0)
    if minimum.ndim == 0:
        minimum, maximum = minimum.reshape(1), maximum.reshape(1)
    zero_dtype = zero_dtype or default_zero_dtype(grid)
    if scale_format is ScaleFormat.E8M0:
        amax = torch.maximum(-minimum, maximum)
        if stored_in is not None:  # also correct if it is tiny in its dtype
            amax = amax.to(torch.promote_types(amax.dtype, torch.float32))
        scale = _power_of_two_scale(amax, grid)
        scale = scale if stored_in is None else stored_scale(scale, stored_in)
        return scale, torch.zeros(scale.shape, dtype=zero_dtype, device=scale.device)
    scale, zero = _plain_scale(minimum, maximum, grid, zero_dtype)
    if global_scale is not None:
        scale = global_scale * scale
    stored_dtype = torch.float8_e4m3fn if scale_format is ScaleFormat.E4M3 else scale_dtype
    own_dtype = stored_dtype or scale.dtype
    is_e4m3 = own_dtype is torch.float8_e4m3fn
    if is_e4m3:
        scale = Grid("float", 8).round(scale)  # a CPU takes five times as long to cast and return
    elif stored_dtype:
        scale = _rounded_to(scale, stored_dtype).to(scale.dtype)
    filled = fill_zeros(scale, _E4M3_SUBSTITUTE if is_e4m3 else torch.finfo(own_dtype).eps)
    if stored_in is None:
        return filled, zero
    kept = stored_scale(filled, stored_in)
    if global_scale is not None or is_e4m3:
        return kept, zero
    dtypes = (scale.dtype, own_dtype, stored_in)
    return _round_up_small_scales(kept, scale, zero, (minimum, maximum), grid, dtypes)


def global_scale_from_amax(amax: Tensor) -> Tensor:
    """NVFP4's scale per tensor: 448 * 6 / amax, so that the largest group scale becomes 448.

    The greatest entry of ``amax`` counts. The result is float32 [1]; 1 where amax is zero, so small
    that the quotient overflows, or NaN.

    >>> global_scale_from_amax(torch.tensor([1.0, 2688.0]))
    tensor([1.])
    """
    amax = amax.abs().max()
    amax = amax.clamp(min=torch.finfo(amax.dtype).tiny)
    scale = _E4M3_LARGEST * _E2M1_LARGEST / amax
    return scale.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).to(torch.float32).reshape(1)


def effective_scale(scale: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """The scale that values are divided by: ``scale``, over ``global_scale`` if there is one."""
    return scale if global_scale is None else scale / global_scale


def fill_zeros(scale: Tensor, substitute: float) -> Tensor:
    """Scales, not negative, with ``substitute`` in place of each zero; may return ``scale`` itself.

    >>> fill_zeros(torch.tensor([0.0, 2.0]), 0.5)
    tensor([0.5000, 2.0000])
    """
    can_look = scale.device.type == "cpu" and not torch.compiler.is_compiling()
    if can_look and scale.numel() and bool(scale.amin() > 0):
        return scale  # the usual case: this check takes a twentieth of the time of filling
    return scale.masked_fill(scale == 0, substitute)


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``scale`` in ``dtype``; underflow gives the smallest positive number instead of zero."""
    return fill_zeros(scale.to(dtype), smallest_of(dtype))


def default_zero_dtype(grid: Grid) -> torch.dtype:
    """The dtype in which zero points of ``grid`` are stored."""
    if grid.kind == "float":
        return torch.float8_e4m3fn
    return torch.int8 if grid.bits <= 8 else torch.int16


def parameter_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the scale of a tensor of ``dtype``: the same, or float16 for unusual dtypes."""
    return dtype if dtype in _PLAIN_DTYPES else torch.float16


def _plain_scale(
    minimum: Tensor, maximum: Tensor, grid: Grid, zero_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale, which may be zero and is not rounded yet, and zero point."""
    steps = grid.qmax - grid.qmin
    if grid.symmetric:
        scale = torch.maximum(-minimum, maximum) / (steps / 2)
        return scale, torch.zeros(scale.shape, dtype=zero_dtype, device=scale.device)
    extent = maximum - minimum
    # the width of a range may overflow its dtype (float16: 65504) although the scale does not
    scale = torch.where(extent.isinf(), maximum / steps - minimum / steps, extent / steps)
    zero = grid.qmin - minimum / scale
    # an empty range gives 0 / 0 here; its code is 0
    return scale, _rounded_to(zero.nan_to_num(nan=0.0).clamp(grid.qmin, grid.qmax), zero_dtype)


def _round_up_small_scales(
    kept: Tensor,
    scale: Tensor,
    zero: Tensor,
    ends: tuple[Tensor, Tensor],
    grid: Grid,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[Tensor, Tensor]:
    """Stored scales and zero points that cover their range even in dtypes with few bits.

    Below its smallest normal number a dtype only has multiples of one number. The nearest may be a
    third less than the scale, so that the ends of the range would be clipped, or zero, so that all
    values would round to zero. The next multiple is used wherever the nearest would clip a step of
    the grid more than the scale itself does.

    Args:
        kept: scales as they would be stored, not zero.
        scale: the same, zero where they underflowed.
        zero: zero points.
        ends: minimum and maximum, whose range contains zero.
        grid: the grid.
        dtypes: all dtypes that the scale is rounded to.
    """
    can_look = kept.device.type == "cpu" and not torch.compiler.is_compiling()
    normal = max(torch.finfo(dtype).smallest_normal for dtype in dtypes)
    if can_look and kept.numel() and bool(scale.amin() >= normal):
        return kept, zero
    minimum, maximum = (end.to(torch.promote_types(end.dtype, torch.float32)) for end in ends)
    within = grid.qmax - grid.qmin
    extent = maximum - minimum
    if grid.symmetric:
        within, extent = within / 2, torch.maximum(-minimum, maximum)
    rounded = torch.where(scale == 0, 0, kept)
    reach = rounded.to(extent.dtype) * (within + grid.last_step)
    is_cut = (rounded < normal) & (extent > reach)
    kept = torch.where(is_cut, rounded + max(map(smallest_of, dtypes)), kept)
    if grid.symmetric:
        return kept, zero
    # shift the range to the middle of the grid: floats at its ends are too coarse
    middle = (grid.qmin + grid.qmax) / 2 - (minimum + maximum) / 2 / kept
    moved = _rounded_to(middle.clamp(grid.qmin, grid.qmax), zero.dtype)
    return kept, torch.where(is_cut, moved.to(torch.float32), zero.to(torch.float32)).to(zero.dtype)


def smallest_of(dtype: torch.dtype) -> float:
    """The smallest positive number of a floating dtype."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def _power_of_two_scale(amax: Tensor, grid: Grid) -> Tensor:
    """2^(floor(log2 amax') - floor(log2 qmax)), where amax' is amax rounded to a power of two.

    OCP Microscaling Formats v1.0, section 6.3, with amax rounded up when its mantissa is 1.75 or
    more (of 6-bit floats 1.9375, half way from their largest to the next power of two): clamping
    values up to there costs less than doubling the scale of all.
    """
    layout = float_layout(amax.dtype)
    rounded_up = 1 << (layout.mantissa - (_FP6_HEADROOM if grid.bits == 6 else _HEADROOM))
    bits = (amax.contiguous().view(layout.integer) + rounded_up).bitwise_and(layout.exponent_mask)
    exponent = torch.floor(torch.log2(bits.view(amax.dtype))) - math.floor(math.log2(grid.qmax))
    biased = (exponent + _E8M0_BIAS).clamp(0, 255)
    scale = torch.exp2(biased.float() - _E8M0_BIAS).to(amax.dtype)
    return torch.where(scale == 0, 1.0, scale)


def _rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, saturating; half to even."""
    if dtype in _PLAIN_DTYPES and torch.promote_types(x.dtype, dtype) == dtype != x.dtype:
        return x.to(dtype)  # a dtype with a wider range than that of x
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return x.clamp(info.min, info.max).to(dtype)
    limits = torch.iinfo(dtype)
    return x.clamp(limits.min, limits.max).round().to(dtype)
