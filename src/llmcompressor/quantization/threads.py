# SPDX-License-Identifier: Apache-2.0
"""How many threads torch uses for many small operations.

A column sweep is thousands of operations of a few microseconds each. Split over threads, each
ends at a barrier: with another process busy on one core, every barrier waits for that core's
next time slice, and the whole becomes an order of magnitude slower. On one thread it is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["one_thread"]


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Run the body on one thread where ``device`` is the CPU; the number is restored after."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
