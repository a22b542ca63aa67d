# SPDX-License-Identifier: Apache-2.0
"""Return of freed heap memory and mapped pages to the operating system."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
from pathlib import Path
from typing import ClassVar

__all__ = ["TOLERATED", "give_back_freed", "let_go_of_pages"]

TOLERATED = 2**26
"""Bytes that may stay freed and held: less than the libraries themselves take. To return what is
wanted again a moment later costs up to an eighth of a run's time, for pages are made anew."""


_kept_anyway = -math.inf
"""The least that this process had beside what was in use since memory was last returned."""


def give_back_freed(*, at_least: int = TOLERATED) -> None:
    """Return freed memory to the operating system, if the C library is glibc.

    Long-lived activations and short-lived temporaries lie side by side in the heap, and glibc only
    shrinks it from its end. Without this call a run would hold far more memory than it uses.

    Args:
        at_least: do nothing if fewer bytes were freed since the last call; 0 to return memory
            always.
    """
    global _kept_anyway  # noqa: PLW0603 - the heap belongs to the process too
    library = _library()
    if library is None:
        return
    unused = _unused(library)
    if at_least > 0 and unused - _kept_anyway < at_least:
        _kept_anyway = min(_kept_anyway, unused)
        return
    library.malloc_trim(0)
    _kept_anyway = _unused(library)


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _unused(library: ctypes.CDLL) -> float:
    """Return the bytes of private memory that the C library has not handed out.

    That is freed memory held by the heap, and memory allocated by others: stacks, Python's small
    objects.
    """
    look = getattr(library, "mallinfo2", None)
    if look is None:  # glibc before 2.33: unknown, so memory is returned each time
        return math.nan
    look.restype = _Heap
    heap = look()
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * mmap.PAGESIZE - int(heap.uordblks) - int(heap.hblkhd)


def let_go_of_pages(address: int, nbytes: int) -> None:
    """Release the pages of a mapped file, so that they no longer count as this process's memory.

    Written data stays in the file, and the page cache writes it to disk when it needs the memory.
    Data that is read again is loaded again. Pages at the ends that are shared with others are kept.

    Args:
        address: the address of the first byte.
        nbytes: the number of bytes.
    """
    library = _library()
    if library is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the C library if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        _ = library.malloc_trim, library.madvise
    except (AttributeError, OSError):  # another one, musl for instance
        return None
    return library
