# SPDX-License-Identifier: Apache-2.0
"""Memory that was freed and that the allocator would keep."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import time

__all__ = ["give_back_freed", "let_go_of_pages"]


_RESPITE = 0.1
"""Seconds between two returns, where they may be left out: some milliseconds each, and more when
the memory is asked for again."""
_returned = 0.0


def give_back_freed(*, sparingly: bool = False) -> None:
    """Return freed memory to the operating system, where the C library can be asked to.

    Activations that live long and temporaries that do not lie side by side in the heap. glibc
    only shrinks it from its end, so that without this a run holds on to far more than it uses.

    Args:
        sparingly: not if it was done a moment ago: what small modules leave is soon wanted again.
    """
    global _returned  # noqa: PLW0603 - the heap belongs to the process too
    library = _library()
    if library is None or (sparingly and time.monotonic() - _returned < _RESPITE):
        return
    library.malloc_trim(0)
    _returned = time.monotonic()


def let_go_of_pages(address: int, nbytes: int) -> None:
    """Have the pages of a mapped file no longer count as this process's memory.

    What was written stays in the file, and the page cache writes it to the disk when it wants the
    memory; what is read again comes back. Pages at the ends that are shared with others are left.

    Args:
        address: of the first byte of the mapping.
        nbytes: how many follow it.
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
    """The C library, if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        _ = library.malloc_trim, library.madvise
    except (AttributeError, OSError):  # another one, musl for instance
        return None
    return library
