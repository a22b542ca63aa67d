# SPDX-License-Identifier: Apache-2.0
"""Codes as they are stored: several to a byte.

Integers of 4 or 8 bits stand in the order of their columns, from the low bits of each 32-bit word
upwards, as their distance from the least of them.

A value of e2m1 is stored as its sign (bit 3) and the place of its magnitude among the eight that
there are (bits 0 to 2)::

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
    magnitude_RC = values_RC.abs()
    # 2m up to 2, then m + 2 up to 4, then 7: the lowest of the three lines, at every member.
    code_RC = torch.minimum(magnitude_RC * 2, magnitude_RC + 2).clamp_(max=7).to(torch.uint8)
    code_RC |= torch.signbit(values_RC).to(torch.uint8) << 3
    return code_RC[:, 0::2] | (code_RC[:, 1::2] << 4)


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
    # two codes, low byte first, become one byte
    pair = codes_RC.contiguous().view(torch.int16)
    byte = (pair & 0xF) | ((pair >> _NIBBLE) & 0xF0)
    return (byte ^ _OFFSET).to(torch.uint8).view(torch.int32)
