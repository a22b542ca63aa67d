# SPDX-License-Identifier: Apache-2.0
"""What is imported is searched for cycles neither while it comes nor later; all else still is."""

from __future__ import annotations

import functools
import subprocess
import sys

from tests.support.rings import RINGS

# Prints: objects exempted by our import; whether the search is on; whether a cycle that came after
# the import, and one that was lost before it, are found. That nothing is exempted where torch was
# imported before, tests/test_lean_import.py shows, which starts such a process for more than that.
ASK = (
    RINGS
    + """
import gc, weakref

gone = Ring()
lost = weakref.ref(gone)
del gone
from llmcompressor import oneshot
frozen, enabled = gc.get_freeze_count(), gc.isenabled()
after = Ring()
later = weakref.ref(after)
del after
print(frozen, enabled, is_found(later), is_found(lost))
"""
)


@functools.cache
def _of_a_first_import() -> list[str]:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_only_what_a_first_import_brings_is_exempted() -> None:
    frozen, enabled, after, _ = _of_a_first_import()
    assert int(frozen) > 200_000
    assert (enabled, after) == ("True", "True")


def test_what_was_unreachable_before_is_not_kept() -> None:
    assert _of_a_first_import()[-1] == "True"
