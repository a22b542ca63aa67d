# SPDX-License-Identifier: Apache-2.0
"""Free memory of an accelerator, and release of torch's cached memory."""

from __future__ import annotations

import gc

import torch

__all__ = ["free_device_memory", "give_back_device_memory"]


def free_device_memory(device: torch.device | int) -> int:
    """Return the bytes that this process can still allocate on an accelerator.

    That is the device's free memory plus the memory cached by torch's allocator and used by no
    tensor. The device counts the cache as used, and it grows to the highest peak so far.

    Args:
        device: the device, or its index.
    """
    index = device if isinstance(device, int) else device.index
    if index is None:
        index = torch.accelerator.current_device_index()
    free, _ = torch.accelerator.get_memory_info(index)
    held = torch.accelerator.memory_reserved(index) - torch.accelerator.memory_allocated(index)
    return int(free) + max(int(held), 0)


def give_back_device_memory() -> None:
    """Return torch's cached memory to the accelerators.

    Its pieces have the sizes of earlier allocations, and later ones may not fit into them.
    """
    if torch.accelerator.is_available():
        gc.collect()  # an unused model may still be kept by a reference cycle
        torch.accelerator.empty_cache()
