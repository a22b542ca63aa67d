# SPDX-License-Identifier: Apache-2.0
"""What is imported is searched for cycles neither while it comes nor later; all else still is."""

from __future__ import annotations

import functools
import gc
import importlib
import subprocess
import sys

import pytest

from llmcompressor.collecting import quick_imports, without_collecting

# Prints: objects exempted by our import; whether the search is on; whether a cycle that was there
# before the import, and one that came after it, are found.
ASK = """
import gc, weakref

class Ring:
    def __init__(self):
        self.me = self

def is_found(ring):
    gc.collect()
    return ring() is None

before = Ring()
{first}
from llmcompressor import oneshot
frozen, enabled = gc.get_freeze_count(), gc.isenabled()
after = Ring()
rings = weakref.ref(before), weakref.ref(after)
del before, after
print(frozen, enabled, *map(is_found, rings))
"""


def _printed(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@functools.cache
def _of_a_first_import() -> list[str]:
    """What is asked for, and whether a cycle is found that was lost before the import."""
    lost = "gone = Ring(); lost = weakref.ref(gone); del gone"
    return _printed(ASK.format(first=lost) + "print(lost() is None)")


def test_what_a_first_import_brings_is_exempted_and_what_comes_later_is_not() -> None:
    frozen, enabled, _, after, _ = _of_a_first_import()
    assert int(frozen) > 200_000
    assert (enabled, after) == ("True", "True")


def test_where_torch_was_imported_before_nothing_is_exempted() -> None:
    assert _printed(ASK.format(first="import torch")) == ["0", "True", "True", "True"]


def test_what_was_unreachable_before_is_not_kept() -> None:
    assert _of_a_first_import()[-1] == "True"


def test_an_import_that_fails_leaves_the_search_as_it_was() -> None:
    before = gc.get_threshold()
    with pytest.raises(ModuleNotFoundError), quick_imports():
        importlib.import_module("no_such_package")
    assert gc.isenabled()
    assert gc.get_threshold() == before


def test_a_search_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collecting():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
