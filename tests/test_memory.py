# SPDX-License-Identifier: Apache-2.0
"""Freed memory is given back where the C library can do so, and nowhere else is it an error."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmcompressor import memory


@pytest.fixture(autouse=True)
def _looked_up_again() -> Iterator[None]:
    memory._trim.cache_clear()
    yield
    memory._trim.cache_clear()


def test_what_is_in_use_stays_as_it_is() -> None:
    kept = torch.arange(100_000)
    del_me = [torch.ones(1000) for _ in range(100)]
    del del_me
    memory.give_back_freed()
    memory.give_back_freed()
    assert torch.equal(kept, torch.arange(100_000))


def test_the_c_library_is_asked_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=asked.append))
    memory.give_back_freed()
    assert asked == [0]


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
    assert memory._trim() is None
