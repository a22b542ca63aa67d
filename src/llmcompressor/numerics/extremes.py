# SPDX-License-Identifier: Apache-2.0
"""Fast minimum, maximum and absolute maximum of short runs of floats on a CPU.

A CPU finds the maximum of integers in a half to a quarter of the time that floats take, which have
to be checked for NaN. The bits of floats, read as integers, have the order of the floats if the
sign bit is 0, and NaN is above infinity. So integers are compared here.

All inputs are split into cells ``[..., Y, h, X, w]``, h rows and w columns each, and results are
``[..., Y, X]``. A large matrix is processed in parts: temporaries stay in a core's cache, which
takes a third of the time of memory that was never used before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmcompressor.numerics.grid import float_layout

_DIMS = (-3, -1)
_SIGN = -(2**15)
"""The sign bit of 16-bit floats."""
_AT_ONCE = 2**19
"""Elements of a part."""
_NARROW = 32
_WITHOUT_SIGNS = 0x7FFF7FFF


def extremes_of_cells(split: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each cell, in the dtype of ``split``.

    Read as integers, floats with sign bit 0 are above those with sign bit 1: so the greatest
    integer is the greatest float unless every float is negative. With negated signs the same holds
    for the minimum. Cells of one sign are processed again.
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
    """The absolute maximum of each cell, in the dtype of ``split``; NaN if it holds one.

    >>> magnitudes_of_cells(torch.tensor([1.0, -3.0, 0.5, 2.0]).reshape(1, 1, 2, 2))
    tensor([[3., 2.]])
    """
    if split.device.type != "cpu":
        return split.abs().amax(_DIMS)
    integer = float_layout(split.dtype).integer
    # of cells so narrow, comparing two 16-bit floats at once is faster
    in_pairs = (
        split.element_size() == 2
        and split.shape[-1] % 2 == 0
        and split.shape[-1] <= _NARROW
        and split.is_contiguous()
        and split.storage_offset() % 2 == 0
    )
    parts = list(_parts(split))
    # one buffer for all of them: reused memory is in the cache
    spare = split.new_empty(parts[0].numel() * (2 if in_pairs else 1))
    found = [
        _magnitudes_by_pairs(part, spare).to(integer)
        if in_pairs
        else torch.abs(part, out=_like(part, spare)).view(integer).amax(_DIMS)
        for part in parts
    ]
    return torch.cat(found, dim=-2).view(split.dtype)


def _like(split: Tensor, spare: Tensor) -> Tensor:
    return spare[: split.numel()].view(split.shape)


def _magnitudes_by_pairs(split: Tensor, spare: Tensor) -> Tensor:
    """Absolute maxima by words of two floats: the greater one is moved to the upper half."""
    words = split.view(torch.int32)
    upper, lower = (_like(words, half.view(torch.int32)) for half in spare.chunk(2))
    torch.bitwise_and(words, _WITHOUT_SIGNS, out=upper)
    torch.bitwise_left_shift(upper, 16, out=lower)
    return torch.maximum(upper, lower, out=upper).amax(_DIMS) >> 16


def _parts(split: Tensor) -> Iterator[Tensor]:
    """Parts of several rows of cells each."""
    elements = max(split.numel() // split.shape[-4], 1)
    yield from torch.split(split, max(_AT_ONCE // elements, 1), dim=-4)


def is_finite(tensor: Tensor) -> bool:
    """Return True if ``tensor`` (any shape and dtype) holds neither NaN nor infinity.

    Only minimum and maximum are checked: NaN propagates into both, infinity is one of them. They
    are computed at memory bandwidth and without a temporary, unlike a sum of 16-bit values.

    >>> is_finite(torch.tensor([1.0, float("nan")])), is_finite(torch.full((2,), 3e38))
    (False, True)
    """
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
        return True
    if tensor.dtype is torch.float4_e2m1fn_x2:  # it has neither
        return True
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)
    least, greatest = tensor.detach().aminmax()
    return bool(torch.isfinite(least) & torch.isfinite(greatest))
