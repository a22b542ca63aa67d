# SPDX-License-Identifier: Apache-2.0
"""A plan says where a run would take more memory than there is, or than was allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmcompressor import plan
from llmcompressor.planning.memory import Capacity, shortages
from llmcompressor.planning.result import Phase

RTN = "modifiers:\n  QuantizationModifier: {targets: [Linear], scheme: W4A16, ignore: [lm_head]}\n"
PHASES = [Phase("load", 100, 10, 0, 0.0), Phase("solve", 300, 70, 0, 0.0)]


@pytest.mark.parametrize(
    ("host", "device", "said"),
    [
        ({}, {}, []),
        ({"free": 300, "allowed": 300}, {"free": 70, "allowed": 70}, []),
        ({"free": 299}, {}, ["Solve takes 300 B of A, and 299 B are free"]),
        ({"free": 299, "allowed": 10}, {}, ["and 299 B are free"]),
        ({"free": 999, "allowed": 10}, {}, ["max_memory allows 10 B"]),
        ({"free": 299}, {"allowed": 69}, ["of A", "Solve takes 70 B of B, where max_memory"]),
    ],
)
def test_what_is_short(host: dict[str, int], device: dict[str, int], said: list[str]) -> None:
    found = list(shortages(PHASES, Capacity("A", **host), Capacity("B", **device)))
    assert len(found) == len(said)
    assert all(words in text for words, text in zip(said, found, strict=True))


def test_a_plan_looks_at_the_machine(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(**more: Any) -> list[str]:
        found = plan(llama_folder, RTN, measure=False, **more)
        assert found.ok
        return [note for note in found.notes if "main memory" in note]

    assert not notes()
    monkeypatch.setattr("llmcompressor.planning.make.free_host_memory", lambda: 0)
    (note,) = notes()
    assert "are free here" in note
