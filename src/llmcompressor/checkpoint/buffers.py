# SPDX-License-Identifier: Apache-2.0
"""A pool of read buffers, reused from block to block.

Blocks of equal size come and go. In the heap each would leave holes, which are returned to the
system, requested again and cleared page by page. Here large tensors get mappings of their own, in
huge pages where the system has them. When the last tensor in a mapping is freed, the next read of
the same size reuses it.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import numpy as np
import torch
from torch import Tensor

__all__ = ["Buffers"]

_APART = 2**21
"""Bytes from which on memory is asked of the system: a huge page."""


class Buffers:
    """A thread-safe pool of buffers by size.

    When a size is requested that has no idle buffer, all idle buffers are returned to the system.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._lock = threading.RLock()  # garbage collection inside may recycle a buffer
        self._is_open = True

    def take(self, nbytes: int) -> Tensor:
        """Return a buffer that nothing else uses.

        Returns:
            uint8 ``[nbytes]`` on the CPU, of any content.
        """
        if nbytes < _APART or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(nbytes, dtype=torch.uint8)
        own = self._used_before(nbytes) or _of_its_own(nbytes)
        if own is None:
            return torch.empty(nbytes, dtype=torch.uint8)  # which raises if memory is exhausted
        array = np.frombuffer(own, dtype=np.uint8)
        # the tensor's storage keeps the array alive as long as any view of it
        weakref.finalize(array, self._take_back, nbytes, own).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Return idle buffers to the system, and free others as soon as they become idle."""
        with self._lock:
            self._is_open = False
            self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the idle buffers."""
        with self._lock:
            return sum(size * len(every) for size, every in self._idle.items())

    def _used_before(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            if self._idle.get(nbytes):
                return self._idle[nbytes].pop()
            self._idle.clear()
        return None

    def _take_back(self, nbytes: int, own: mmap.mmap) -> None:
        with self._lock:
            if self._is_open:
                self._idle.setdefault(nbytes, []).append(own)


def _of_its_own(nbytes: int) -> mmap.mmap | None:
    try:
        own = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no memory, or as many mappings as a process may have
        return None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        own.madvise(mmap.MADV_HUGEPAGE)
    return own
