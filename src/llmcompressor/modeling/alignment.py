# SPDX-License-Identifier: Apache-2.0
"""Memory alignment of float32 weights on the CPU, for reproducible products.

A product of one row, or with one output, sums in another order where a float32 weight does not
start at a multiple of the width of the processor's registers. transformers leaves weights where
their file was mapped, after a header of any length; weights that are loaded block by block have
memory of their own. Both have to give the same bytes.
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
    """Move unaligned float32 CPU parameters of ``model`` to aligned memory; values stay the same.

    Parameters that share their memory keep sharing it. One that partly overlaps another tensor of
    the model stays where it is.
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
    """Places of tensors that overlap other tensors in memory without being the same."""
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
    """Bytes from the first element of a tensor to the end of its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * tensor.element_size()
