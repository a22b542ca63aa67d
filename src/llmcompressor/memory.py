# SPDX-License-Identifier: Apache-2.0
"""Memory that was freed and that the allocator would keep."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["give_back_freed", "give_back_large_at_once", "without_collecting"]

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


@contextmanager
def without_collecting() -> Iterator[None]:
    """Do not look for unreachable cycles inside.

    While a model of ten thousands of modules is built, the search goes over all of them again and
    again and finds next to nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        _ = library.malloc_trim, library.mallopt
    except (AttributeError, OSError):  # another one, musl for instance
        return None
    return library
