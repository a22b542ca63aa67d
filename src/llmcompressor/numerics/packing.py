# SPDX-License-Identifier: Apache-2.0
"""Codes as they are stored: several to a byte.

Integers of 4 or 8 bits stand in the order of their columns, from the low bits of each 32-bit word
upwards, as their distance from the least of them.

A value of e2m1 is stored as its sign (bit 3; zero has none) and the place of its magnitude among
the eight that there are (bits 0 to 2)::

    magnitude  0  0.5  1  1.5  2  3  4  6
    code       0   1   2   3   4  5  6  7

The even column of each pair lies in the low half of the byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.errors import InputError

__all__ = ["can_pack", "pack_e2m1", "pack_integers"]

_WORD = 32
_NIBBLE, _OFFSET = 4, 0x88


def pack_e2m1(values_RC: Tensor) -> Tensor:
    """Values of the e2m1 grid as bytes.

    Args:
        values_RC: members of the grid, any floating dtype, ``[R, C]`` with C even.

    Returns:
        uint8 ``[R, C / 2]``.

    >>> pack_e2m1(torch.tensor([[0.5, -6.0, 3.0, 0.0]])).tolist()
    [[241, 5]]
    """
    half_RC = (values_RC * 2).to(torch.int8)  # whole numbers, and small ones are quick
    magnitude_RC = half_RC.abs()
    # n up to 4, then n / 2 + 2 up to 8, then 7: the lowest of the three lines, at every member.
    code_RC = torch.minimum(magnitude_RC, (magnitude_RC >> 1) + 2).clamp_(max=7)
    code_RC |= (half_RC >> 4) & 8
    return _pair_up(code_RC)


def can_pack(columns: int, bits: int) -> bool:
    """Whether :func:`pack_integers` can pack rows of ``columns`` codes of ``bits``."""
    return bits in (_NIBBLE, 8) and columns * bits % _WORD == 0


def pack_integers(codes_RC: Tensor, bits: int) -> Tensor:
    """Integer codes as 32-bit words.

    Args:
        codes_RC: int8, ``[R, C]``.
        bits: of a code: 4 or 8; see :func:`can_pack`.

    Returns:
        int32 ``[R, C * bits / 32]``.

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
    return (_pair_up(codes_RC.contiguous() & 0xF) ^ _OFFSET).view(torch.int32)


def _pair_up(codes_RC: Tensor) -> Tensor:
    """Codes from 0 to 15, int8, as bytes: of each two the first in the low half."""
    pair = codes_RC.view(torch.int16)  # the first is the low byte
    return (pair | (pair >> _NIBBLE)).to(torch.uint8)
