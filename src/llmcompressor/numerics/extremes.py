# SPDX-License-Identifier: Apache-2.0
"""The least, the greatest and the largest magnitude of short runs of floats, at a CPU's best rate.

A CPU finds the greatest of integers in half to a quarter of the time that it takes for as many
floats: those must be watched for NaN. Bits of floats, read as integers, rise with the float where
its sign bit is 0, and NaN lies beyond infinity. So integers are compared here.

Everything is given split into cells ``[..., Y, h, X, w]``, h rows and w columns each, and results
are ``[..., Y, X]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.numerics.grid import float_layout

__all__ = ["extremes_of_cells", "magnitudes_of_cells"]

_DIMS = (-3, -1)
_SIGN = -(2**15)
"""The sign bit of 16-bit floats."""


def extremes_of_cells(split: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest element of each cell, in the dtype of ``split``.

    Read as integers, floats whose sign bit is 0 are above those where it is 1: so the greatest
    integer is the greatest float unless every float is negative. With signs turned the same holds
    for the least. Cells of one sign are looked at again.
    """
    if split.device.type != "cpu" or split.dtype not in (torch.bfloat16, torch.float16):
        return split.amin(_DIMS), split.amax(_DIMS)
    bits = split.view(torch.int16)
    greatest = bits.amax(_DIMS).view(split.dtype)
    least = ((bits ^ _SIGN).amax(_DIMS) ^ _SIGN).view(split.dtype)
    cells = split.transpose(-3, -2)
    for found, extreme in ((greatest, torch.amax), (least, torch.amin)):
        wrong = found.signbit() if extreme is torch.amax else ~found.signbit()
        if bool(wrong.any()):  # one cell of 16 in 2^15
            found[wrong] = extreme(cells[wrong], (-2, -1))
    return least, greatest


def magnitudes_of_cells(split: Tensor) -> Tensor:
    """The largest absolute value of each cell, in the dtype of ``split``; NaN where there is one.

    >>> magnitudes_of_cells(torch.tensor([1.0, -3.0, 0.5, 2.0]).reshape(1, 1, 2, 2))
    tensor([[3., 2.]])
    """
    if split.device.type != "cpu":
        return split.abs().amax(_DIMS)
    integer = float_layout(split.dtype).integer
    return split.abs().view(integer).amax(_DIMS).view(split.dtype)
