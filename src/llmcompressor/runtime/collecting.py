# SPDX-License-Identifier: Apache-2.0
"""Garbage collector settings for imports and model building.

torch and transformers bring half a million objects that live as long as the process. The collector
scans all of them repeatedly while they are imported, in each later full collection, and several
times when the interpreter exits.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_disabled", "quick_imports"]


_YOUNG = 20_000
"""New objects after which they are searched."""
_NEVER = 10**6


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector inside.

    While a model of tens of thousands of modules is built, the collector scans all of them
    repeatedly and frees next to nothing.
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
    """Import torch and its dependents inside, and exempt them from collection (``gc.freeze``).

    Each object is scanned once, while it is new: garbage of about 8 MiB is kept. If torch is
    imported already, the caller's objects may exist too, and have to stay collectable. Imports are
    faster in that case as well, but nothing is frozen.
    """
    first = "torch" not in sys.modules
    if first:
        gc.collect()  # otherwise present garbage would be frozen
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG, _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
    if first and "torch" in sys.modules:
        gc.freeze()
