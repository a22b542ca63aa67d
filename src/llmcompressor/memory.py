# SPDX-License-Identifier: Apache-2.0
"""Memory that was freed and that the allocator keeps."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

__all__ = ["give_back_freed"]


def give_back_freed() -> None:
    """Return freed memory to the operating system, where the C library can be asked to.

    Activations that live long and temporaries that do not lie side by side in the heap. glibc
    only shrinks it from its end, so that without this a run holds on to far more than it uses.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # another C library, musl for instance
        return None
    return trim
