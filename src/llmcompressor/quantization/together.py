# SPDX-License-Identifier: Apache-2.0
"""What several processes of a training have: observations, and weights that are spread over them.

A weight that is spread (a ``DTensor``, as of FSDP version 2) is told by what it can do: importing
its module would load all of torch.distributed. All processes have to call these functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["gathered", "local", "whole", "write"]


def gathered(values: list[Any]) -> list[list[Any]]:
    """``values`` of every process, in the order of their ranks; of this one alone if it is alone.

    Args:
        values: tensors in tuples, or ``None``; as many on every process. They are small: ranges,
            or histograms.
    """
    distributed = torch.distributed
    alone = not (distributed.is_available() and distributed.is_initialized())
    if alone or distributed.get_world_size() == 1:
        return [values]
    devices = [_device_of(value) for value in values]
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, [_moved(value, None) for value in values])
    return [
        [_moved(value, device) for value, device in zip(one, devices, strict=True)] for one in ranks
    ]


def whole(tensor: Tensor) -> Tensor:
    """The tensor put together from all processes, or itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of this process, which shares memory with the tensor, or itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def write(target: Any, values: Tensor) -> None:
    """Put ``values``, which every process has whole, into ``target``, spread as it is."""
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # see above

        values = local(
            distribute_tensor(values, target.device_mesh, target.placements, src_data_rank=None)
        )
    local(target.data).copy_(values)


def _device_of(value: Any) -> torch.device | None:
    return None if value is None else value[0].device


def _moved(value: Any, device: torch.device | None) -> tuple[Tensor, ...] | None:
    return None if value is None else tuple(part.to(device or "cpu") for part in value)
