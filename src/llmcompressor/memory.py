# SPDX-License-Identifier: Apache-2.0
"""Memory that was freed and that the allocator would keep."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys

__all__ = [
    "give_back_freed",
    "give_back_large_at_once",
    "let_go_of_pages",
]

_MMAP_THRESHOLD = -3
"""glibc's ``M_MMAP_THRESHOLD``."""
_LARGE = 2**22


def give_back_freed() -> None:
    """Return freed memory to the operating system, where the C library can be asked to.

    Activations that live long and temporaries that do not lie side by side in the heap. glibc
    only shrinks it from its end, so that without this a run holds on to far more than it uses.
    """
    library = _library()
    if library is not None:
        library.malloc_trim(0)


def give_back_large_at_once() -> None:
    """Have what is larger than 4 MiB returned to the operating system the moment it is freed.

    By itself glibc raises this limit to the size of what was freed last, and what is freed from
    then on lies in the heap, between things that live longer. It stays so for the process: the
    limit cannot be read, and so not be put back.
    """
    library = _library()
    if library is not None:
        library.mallopt(_MMAP_THRESHOLD, _LARGE)


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
        _ = library.malloc_trim, library.mallopt, library.madvise
    except (AttributeError, OSError):  # another one, musl for instance
        return None
    return library
