# SPDX-License-Identifier: Apache-2.0
"""How much memory of an accelerator is free, and that which torch keeps for nobody."""

from __future__ import annotations

import gc

import torch

__all__ = ["free_device_memory", "give_back_device_memory"]


def free_device_memory(device: torch.device | int) -> int:
    """Bytes that this process may still take on an accelerator.

    What the device has left, and what torch's allocator holds there and has given to no tensor:
    to the device that is taken, and it grows to the highest peak that there ever was.

    Args:
        device: which, as a device or by its index.
    """
    index = device if isinstance(device, int) else device.index
    if index is None:
        index = torch.accelerator.current_device_index()
    free, _ = torch.accelerator.get_memory_info(index)
    held = torch.accelerator.memory_reserved(index) - torch.accelerator.memory_allocated(index)
    return int(free) + max(int(held), 0)


def give_back_device_memory() -> None:
    """Return to the accelerators what torch holds there for nobody.

    It lies in pieces of sizes that were asked for before, which what comes next may not fit into.
    """
    if torch.accelerator.is_available():
        gc.collect()  # a model that was let go of may still hold itself in a cycle
        torch.accelerator.empty_cache()
