# SPDX-License-Identifier: Apache-2.0
"""All-gather of observed statistics over the processes of a distributed training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["gathered"]


def gathered(values: list[Any]) -> list[list[Any]]:
    """``values`` of every process in rank order; those of this process alone without a group.

    Args:
        values: tuples of tensors, or ``None``; equally many on every process. They are small:
            ranges or histograms.
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


def _device_of(value: Any) -> torch.device | None:
    return None if value is None else value[0].device


def _moved(value: Any, device: torch.device | None) -> tuple[Tensor, ...] | None:
    return None if value is None else tuple(part.to(device or "cpu") for part in value)
