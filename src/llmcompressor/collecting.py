# SPDX-License-Identifier: Apache-2.0
"""Keep Python's search for unreachable cycles away from what is never unreachable.

torch and transformers bring half a million objects which live as long as the process. The search
goes over all of them again and again while they are imported, whenever it comes to its oldest
generation later, and several times when the interpreter ends.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quick_imports", "without_collecting"]


_YOUNG = 20_000
"""New objects after which they are searched."""
_NEVER = 10**6


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


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch and what stands on it inside, and never search there again (``gc.freeze``).

    Each object is looked at once, while it is new: what is unreachable by then is 8 MiB. Where
    torch is there already, objects of the caller's may be too: a model that he lets go of later
    must be found then. Imports are quicker in that case as well, but nothing is exempted.
    """
    first = "torch" not in sys.modules
    if first:
        gc.collect()  # or what is unreachable by now would be kept for good
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG, _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
    if first and "torch" in sys.modules:
        gc.freeze()
