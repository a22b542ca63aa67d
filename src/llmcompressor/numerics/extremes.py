# SPDX-License-Identifier: Apache-2.0
"""The least, the greatest and the largest magnitude of short runs of floats, at a CPU's best rate.

A CPU finds the greatest of integers in half to a quarter of the time that it takes for as many
floats: those must be watched for NaN. Bits of floats, read as integers, rise with the float where
its sign bit is 0, and NaN lies beyond infinity. So integers are compared here.

Everything is given split into cells ``[..., Y, h, X, w]``, h rows and w columns each, and results
are ``[..., Y, X]``. A large matrix is looked at by parts: what is computed on the way stays in a
core's cache, which takes a third of the time of memory that was never used before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmcompressor.numerics.grid import float_layout

__all__ = ["extremes_of_cells", "magnitudes_of_cells"]

_DIMS = (-3, -1)
_SIGN = -(2**15)
"""The sign bit of 16-bit floats."""
_AT_ONCE = 2**19
"""Elements of a part."""
_NARROW = 32
_WITHOUT_SIGNS = 0x7FFF7FFF


def extremes_of_cells(split: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest element of each cell, in the dtype of ``split``.

    Read as integers, floats whose sign bit is 0 are above those where it is 1: so the greatest
    integer is the greatest float unless every float is negative. With signs turned the same holds
    for the least. Cells of one sign are looked at again.
    """
    if split.device.type != "cpu" or split.dtype not in (torch.bfloat16, torch.float16):
        return split.amin(_DIMS), split.amax(_DIMS)
    found = [_extremes_of_part(part) for part in _parts(split)]
    least, greatest = (torch.cat(every, dim=-2) for every in zip(*found, strict=True))
    return least, greatest


def _extremes_of_part(split: Tensor) -> tuple[Tensor, Tensor]:
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
    in_pairs = _has_narrow_pairs(split)
    find = _magnitudes_by_pairs if in_pairs else _magnitudes_of_part
    parts = list(_parts(split))
    # one for all of them: memory that is not new is in the cache
    spare = split.new_empty(parts[0].numel() * (2 if in_pairs else 1))
    found = [find(part, integer, spare) for part in parts]
    return torch.cat(found, dim=-2).view(split.dtype)


def _magnitudes_of_part(split: Tensor, integer: torch.dtype, spare: Tensor) -> Tensor:
    bits = torch.abs(split, out=_like(split, spare)).view(integer)
    return bits.amax(_DIMS)


def _like(split: Tensor, spare: Tensor) -> Tensor:
    return spare[: split.numel()].view(split.shape)


def _has_narrow_pairs(split: Tensor) -> bool:
    """Whether cells are so narrow that it pays to look at two 16-bit floats at once."""
    return (
        split.element_size() == 2
        and split.shape[-1] % 2 == 0
        and split.shape[-1] <= _NARROW
        and split.is_contiguous()
        and split.storage_offset() % 2 == 0
    )


def _magnitudes_by_pairs(split: Tensor, integer: torch.dtype, spare: Tensor) -> Tensor:
    """Of words of two, the greater magnitude is brought to the upper half; the rest is noise."""
    words = split.view(torch.int32)
    upper, lower = (_like(words, half.view(torch.int32)) for half in spare.chunk(2))
    torch.bitwise_and(words, _WITHOUT_SIGNS, out=upper)
    torch.bitwise_left_shift(upper, 16, out=lower)
    words = torch.maximum(upper, lower, out=upper)
    return (words.amax(_DIMS) >> 16).to(integer)


def _parts(split: Tensor) -> Iterator[Tensor]:
    """Rows of cells, some at a time."""
    elements = max(split.numel() // split.shape[-4], 1)
    yield from torch.split(split, max(_AT_ONCE // elements, 1), dim=-4)
