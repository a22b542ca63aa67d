# SPDX-License-Identifier: Apache-2.0
"""Memory for what is read, which is used again for what is read next.

What is read comes and goes, one block like another. In the heap each would leave holes, which are
returned to the system page by page, and asked for again, and cleared, page by page. Here large
tensors have memory of their own, in huge pages where the system has them, and when the last tensor
in it is gone the next of the same size takes its place.
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
    """Memory of the sizes that come again; it may be used by several threads.

    What lies idle is what the next block is read to: when a size is asked for of which there is
    none, all that is idle is returned to the system.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._lock = threading.RLock()  # memory may be freed by a collection that begins inside
        self._is_open = True

    def take(self, nbytes: int) -> Tensor:
        """Memory that nobody else uses.

        Returns:
            uint8 ``[nbytes]`` on the CPU, of any content.
        """
        if nbytes < _APART or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(nbytes, dtype=torch.uint8)
        own = self._used_before(nbytes) or _of_its_own(nbytes)
        if own is None:
            return torch.empty(nbytes, dtype=torch.uint8)  # which says so if there is none at all
        array = np.frombuffer(own, dtype=np.uint8)
        # the tensor's storage keeps the array for as long as anything looks at it
        weakref.finalize(array, self._take_back, nbytes, own).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Return what is idle to the system, and from now on what becomes so."""
        with self._lock:
            self._is_open = False
            self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """What lies here and is used by nobody."""
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
