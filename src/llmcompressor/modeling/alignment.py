# SPDX-License-Identifier: Apache-2.0
"""Where in memory weights begin, which the last bits of a product depend on.

A product of one row, or with one output, is summed in another order where a float32 weight does
not begin at a multiple of the width of the processor's registers. transformers leaves weights
where their file was mapped, behind a header of any length; what is read block by block lies in
memory of its own. Both are to give the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

__all__ = ["align"]

_Place = tuple[int, tuple[int, ...], tuple[int, ...]]
_BYTES = 64
"""What torch itself aligns to."""


def align(model: Module) -> None:
    """Move the float32 parameters of ``model`` on the CPU that begin elsewhere; values stay.

    Parameters that share their memory go on to do so. One that shares a part of it with another
    tensor of the model stays where it is.
    """
    moved: dict[_Place, Tensor] = {}
    left = _overlapping(model)
    for parameter in model.parameters():
        if parameter.dtype is not torch.float32 or parameter.device.type != "cpu":
            continue
        place = _place_of(parameter)
        if parameter.data_ptr() % _BYTES and place not in left:
            if place not in moved:
                moved[place] = parameter.data.clone()
            parameter.data = moved[place]


def _place_of(tensor: Tensor) -> _Place:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _overlapping(model: Module) -> set[_Place]:
    """Places of tensors that share memory with others that are not the same."""
    held = [one for one in (*model.parameters(), *model.buffers()) if one.device.type == "cpu"]
    spans = {
        _place_of(one): (one.data_ptr(), one.data_ptr() + _extent(one))
        for one in held
        if one.layout is torch.strided and one.numel()
    }
    found: set[_Place] = set()
    last, end = None, 0
    for place, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if last is not None and start < end:
            found |= {last, place}
        if stop > end:
            last, end = place, stop
    return found


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * tensor.element_size()
