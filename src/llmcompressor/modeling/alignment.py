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

_BYTES = 64
"""What torch itself aligns to."""


def align(model: Module) -> None:
    """Move the float32 parameters of ``model`` on the CPU that begin elsewhere; values stay.

    Parameters that share their memory go on to do so.
    """
    moved: dict[tuple[object, ...], Tensor] = {}
    for parameter in model.parameters():
        if parameter.dtype is not torch.float32 or parameter.device.type != "cpu":
            continue
        if parameter.data_ptr() % _BYTES:
            place = (parameter.data_ptr(), tuple(parameter.shape), parameter.stride())
            if place not in moved:
                moved[place] = parameter.data.clone()
            parameter.data = moved[place]
