# SPDX-License-Identifier: Apache-2.0
"""Freed memory is given back where the C library can do so, and nowhere else is it an error."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from llmcompressor import memory


@pytest.fixture(autouse=True)
def _looked_up_again() -> Iterator[None]:
    memory._library.cache_clear()
    yield
    memory._library.cache_clear()


def test_what_is_in_use_stays_as_it_is() -> None:
    kept = torch.arange(100_000)
    del_me = [torch.ones(1000) for _ in range(100)]
    del del_me
    memory.give_back_freed()
    memory.give_back_freed()
    assert torch.equal(kept, torch.arange(100_000))


def test_the_c_library_is_asked_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(sys, "platform", "linux")
    library = SimpleNamespace(
        malloc_trim=asked.append,
        madvise=None,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    memory.give_back_freed()
    memory.give_back_freed(sparingly=True)
    assert asked == [0]
    memory.give_back_freed()
    assert asked == [0, 0]
    monkeypatch.setattr(memory, "_RESPITE", 0.0)
    memory.give_back_freed(sparingly=True)
    assert asked == [0, 0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted in /proc")
def test_pages_of_a_file_are_let_go_of_and_come_back(tmp_path: Path) -> None:
    nbytes = 64 * 2**20
    file = tmp_path / "file"
    file.write_bytes(b"")
    os.truncate(file, nbytes)
    mapped = torch.from_file(str(file), shared=True, size=nbytes, dtype=torch.uint8)
    mapped.fill_(7)
    held = psutil.Process().memory_info().rss
    memory.let_go_of_pages(mapped.data_ptr(), nbytes)
    assert held - psutil.Process().memory_info().rss > nbytes * 0.9
    memory.let_go_of_pages(mapped.data_ptr() + 1, 3)  # no whole page
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
    memory.give_back_freed()
    memory.let_go_of_pages(2**20, 2**20)
    assert memory._library() is None
