# SPDX-License-Identifier: Apache-2.0
"""Packing of codes for storage: several to a byte.

Integers of 4 or 8 bits are stored in the order of their columns, from the low bits of each 32-bit
word upwards, as offsets from the smallest integer.

A value of e2m1 is stored as its sign (bit 3; zero has none) and the index of its magnitude among
the eight magnitudes (bits 0 to 2)::

    magnitude  0  0.5  1  1.5  2  3  4  6
    code       0   1   2   3   4  5  6  7

The even column of each pair is in the low half of the byte.

A value of e2m3 is stored as its sign (bit 5) and the index of its magnitude among the 32 magnitudes
(bits 0 to 4). Four of them fill three bytes, from the low bits upwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.errors import InputError
from llmcompressor.numerics.grid import Grid, float_layout, power_of_two

_WORD = 32
_NIBBLE, _OFFSET = 4, 0x88
_SIGN, _SIGN_OF_6 = 8, 32
_OF_FOUR = (0x3F, 0xFC0, 0x3F000, 0xFC0000)
"""Where each of four codes of 6 bits lies in their 24 bits; each byte of the four holds one."""
_ONE_AND_A_HALF = 1.5


def pack_e2m1(x_RC: Tensor) -> Tensor:
    """Round to the nearest e2m1 values, ties to even, and pack their codes to uint8 ``[R, C / 2]``.

    A code is round(2|x|) up to a magnitude of 2, round(|x|) + 2 up to 4, and round(|x| / 2) + 4 up
    to 6: everywhere the least of the three. Added to 1.5 * 2^(23 - k), a float32 is rounded to
    multiples of 2^-k, half to even, and its lowest byte holds their number.

    ``x_RC`` is from -6 to 6, with C even, and may be overwritten.

    >>> pack_e2m1(torch.tensor([[0.5, -6.0, 2.5, 2.6]])).tolist()
    [[241, 84]]
    """
    if x_RC.dtype is torch.float64:
        x_RC = Grid("float", 4).round_(x_RC)
    x_RC = x_RC.to(torch.float32)
    sum_RC = x_RC + _ONE_AND_A_HALF * 2.0**22
    half_RC = _lowest_byte(sum_RC)
    whole_RC = _lowest_byte(torch.add(x_RC, _ONE_AND_A_HALF * 2.0**23, out=sum_RC))
    double_RC = _lowest_byte(x_RC.add_(_ONE_AND_A_HALF * 2.0**24))
    code_RC = torch.minimum(half_RC.abs(), whole_RC.abs_().add_(2), out=whole_RC)
    code_RC = torch.minimum(code_RC, double_RC.abs_().add_(4), out=code_RC)
    code_RC |= half_RC.bitwise_right_shift_(4).bitwise_and_(_SIGN)
    return _pack_4_bit_codes(code_RC)


def pack_e2m3(x_RC: Tensor) -> Tensor:
    """Round to the nearest e2m3 values, ties to even, and pack their codes to ``[R, 3 C / 4]``.

    The same as :func:`pack_e2m1`: a code is the least of round(8|x|), round(4|x|) + 8 and
    round(2|x|) + 16. Zero has a sign here, as in the loaders. ``x_RC`` is from -7.5 to 7.5, with C
    a multiple of 4, and may be overwritten.

    >>> pack_e2m3(torch.tensor([[0.125, -7.5, 2.0, 0.0]])).tolist()
    [[193, 15, 1]]
    """
    if x_RC.dtype is torch.float64:
        x_RC = Grid("float", 6).round_(x_RC)
    x_RC = x_RC.to(torch.float32)
    code_RC = _lowest_byte(x_RC + _ONE_AND_A_HALF * 2.0**20).abs_()
    for step, first in ((2.0**21, 8), (2.0**22, 16)):
        next_RC = _lowest_byte(x_RC + _ONE_AND_A_HALF * step).abs_().add_(first)
        code_RC = torch.minimum(code_RC, next_RC, out=code_RC)
    code_RC |= x_RC.signbit().to(torch.int8).mul_(_SIGN_OF_6)
    four = code_RC.view(torch.int32)  # the first is the lowest byte
    word = four & _OF_FOUR[0]
    for place, mask in enumerate(_OF_FOUR[1:], start=1):
        word |= (four >> 2 * place) & mask
    R, quarters = word.shape
    return word.view(torch.uint8).reshape(R, quarters, 4)[..., :3].reshape(R, 3 * quarters)


def _lowest_byte(x: Tensor) -> Tensor:
    return x.view(torch.int32).to(torch.int8)


def can_pack(columns: int, bits: int) -> bool:
    """Return True if :func:`pack_integers` can pack rows of ``columns`` codes of ``bits``."""
    return bits in (_NIBBLE, 8) and columns * bits % _WORD == 0


def pack_integers(codes_RC: Tensor, bits: int) -> Tensor:
    """Pack int8 codes of 4 or 8 bits, ``[R, C]``, into int32 words, ``[R, C * bits / 32]``.

    Raises:
        InputError: a row does not fill whole words, see :func:`can_pack`.

    >>> [hex(word) for word in pack_integers(torch.arange(-8, 8, dtype=torch.int8)[None], 4)[0]]
    ['0x76543210', '-0x1234568']
    """
    if not can_pack(codes_RC.shape[-1], bits):
        raise InputError(
            f"Rows of {codes_RC.shape[-1]} codes of {bits} bits are not packed here.",
            "Use compressed-tensors' packer.",
        )
    if bits == 8:
        return (codes_RC.contiguous().view(torch.uint8) ^ 0x80).view(torch.int32)
    return (_pack_4_bit_codes(codes_RC.contiguous() & 0xF) ^ _OFFSET).view(torch.int32)


def _pack_4_bit_codes(codes_RC: Tensor) -> Tensor:
    """Pack int8 codes from 0 to 15, two in a byte, the first in the low half."""
    pair = codes_RC.view(torch.int16)  # the first is the low byte
    return (pair | (pair >> _NIBBLE)).to(torch.uint8)


# --------------------
# Recovery of the codes of a rounded weight where division alone does not find them.
#
# A rounded weight w' = (q - z) s went through the dtype of its scale, step by step: q and z were
# rounded to it, then their difference, then the product. If a code needs more bits than that dtype
# has, w' / s + z is close to q, and the code nearest to it may decode to another value. With d = q
# - z as the loader computes it, w' / s is within one unit of the last place of d: some number of
# the dtype near w' / s is d, and d + z, rounded, is a code that the loader decodes to w'.

_STEPS = (0, -1, 1, -2, 2, -3, 3, -4, 4)
"""In half units of the last place of each value: the spacing halves below a power of two."""


def needs_recoding(grid: Grid, dtype: torch.dtype) -> bool:
    """Return True if float32 division may not recover the code of a weight rounded in ``dtype``."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    if grid.kind == "float":
        return not grid.symmetric
    significand = float_layout(dtype).mantissa + 1
    return grid.bits + (not grid.symmetric) > significand


def recode(x: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """The code of each x, float32: the nearest one that loaders decode to x, if there is one.

    ``scale`` is the effective one in the dtype that loaders compute in; it and ``zero`` broadcast
    to x.
    """
    wide = scale.float()
    codes = grid.quantize(x.float(), wide, zero)
    is_off = _is_off(codes, x, scale, zero, grid)
    if not bool(is_off.any()):
        return codes
    shift = torch.zeros_like(wide) if zero is None else zero.to(scale.dtype).float()
    middle = (x.float() / wide).to(scale.dtype)
    unit = power_of_two(middle).float() * 2.0 ** -(float_layout(scale.dtype).mantissa + 1)
    middle = middle.float()
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
