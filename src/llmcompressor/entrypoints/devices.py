# SPDX-License-Identifier: Apache-2.0
"""Check of a device argument against the devices of this machine."""

from __future__ import annotations

from typing import Any

import torch

from llmcompressor.errors import ArgumentError

__all__ = ["named_device"]


def named_device(asked: Any, what: str = "The argument 'device'") -> torch.device:
    """Parse a device argument and check that the device exists.

    Args:
        asked: a name such as ``"cuda:0"``, or a device.
        what: name of the argument, for the error.

    Raises:
        ArgumentError: the name is invalid or the device is missing; lists the devices that exist.

    >>> named_device("cpu")
    device(type='cpu')
    """
    counts = _counts()
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError, ValueError):
        raise _refused(asked, "no device has that name", counts, what) from None
    if device.type == "meta":
        raise _refused(asked, "nothing can be computed there", counts, what)
    if (device.index or 0) >= counts.get(device.type, 0):
        raise _refused(asked, "this machine, or this build of torch, has none", counts, what)
    return device


def _counts() -> dict[str, int]:
    """Number of available devices by type."""
    counts = {"cpu": 1}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        counts[accelerator.type] = torch.accelerator.device_count()
    return counts


def _refused(asked: Any, why: str, counts: dict[str, int], what: str) -> ArgumentError:
    names = [kind if count == 1 else f"{kind}:0 to {count - 1}" for kind, count in counts.items()]
    return ArgumentError(
        f"{what} cannot be {str(asked)!r}: {why}.",
        f"This machine has {' and '.join(names)}.",
    )
