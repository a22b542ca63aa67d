# SPDX-License-Identifier: Apache-2.0
"""Freed memory is given back where the C library can do so, and nowhere else is it an error."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompressor.runtime import memory

LOOK = memory._unused_heap_bytes


@pytest.fixture(autouse=True)
def _looked_up_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "_unused_heap_bytes", LOOK)
    look_up = memory._library
    look_up.cache_clear()
    yield
    look_up.cache_clear()


def test_what_is_in_use_stays_as_it_is() -> None:
    kept = torch.arange(100_000)
    del_me = [torch.ones(1000) for _ in range(100)]
    del del_me
    memory.malloc_trim()
    memory.malloc_trim()
    assert torch.equal(kept, torch.arange(100_000))


class _Library:
    """A C library with ``held`` bytes that were freed, of which a return leaves a tenth."""

    madvise = None

    def __init__(self, held: int) -> None:
        self.held, self.asked = held, 0

    def malloc_trim(self, pad: int) -> None:
        self.held //= 10
        self.asked += 1


def test_memory_is_returned_when_enough_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library(2**30)
    monkeypatch.setattr(memory, "_library", lambda: library)
    monkeypatch.setattr(memory, "_unused_heap_bytes", lambda library: float(library.held))
    monkeypatch.setattr(memory, "_kept_anyway", -math.inf)
    memory.malloc_trim()
    assert library.asked == 1
    memory.malloc_trim()
    assert library.asked == 1
    library.held += memory.TOLERATED
    memory.malloc_trim()
    assert library.asked == 2
    memory.malloc_trim(at_least=0)  # in any case
    assert library.asked == 3
    library.held = 2**30
    memory.malloc_trim()
    library.held = 0  # what others held, they have let go of
    memory.malloc_trim()
    library.held = memory.TOLERATED
    memory.malloc_trim()
    assert library.asked == 5


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted in /proc")
def test_pages_of_a_file_are_let_go_of_and_come_back(tmp_path: Path) -> None:
    nbytes = 64 * 2**20
    file = tmp_path / "file"
    file.write_bytes(b"")
    os.truncate(file, nbytes)
    mapped = torch.from_file(str(file), shared=True, size=nbytes, dtype=torch.uint8)
    mapped.fill_(7)
    held = psutil.Process().memory_info().rss
    memory.release_pages(mapped.data_ptr(), nbytes)
    assert held - psutil.Process().memory_info().rss > nbytes * 0.9
    memory.release_pages(mapped.data_ptr() + 1, 3)  # no whole page
    assert int(mapped.min()) == int(mapped.max()) == 7


def _no_library(name: Any) -> Any:
    raise OSError("no such library")


@pytest.mark.parametrize(
    ("platform", "library"),
    [("linux", lambda name: object()), ("linux", _no_library), ("darwin", None), ("win32", None)],
    ids=["another C library", "none", "darwin", "windows"],
)
def test_elsewhere_nothing_happens(
    platform: str, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", library)
    memory.malloc_trim()
    memory.release_pages(2**20, 2**20)
    assert memory._library() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_that_no_file_has_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(memory, "release_pages", lambda address, _: released.append(address))
    save_file({"x": torch.arange(2**16)}, tmp_path / "x.safetensors")
    clean = load_file(tmp_path / "x.safetensors")["x"]
    changed = load_file(tmp_path / "x.safetensors")["x"]
    changed[2000] = -1
    for tensor in (clean, changed, torch.arange(2**16)):
        tensor.sum()
        memory.release_clean_pages(tensor.data_ptr(), tensor.nbytes)
    assert released == [clean.data_ptr()]
