# SPDX-License-Identifier: Apache-2.0
"""The record of stages, whatever happens while it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.power_cuts import State, power_cuts

from llmcompressor.entrypoints.stages import StageRecord


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files")
def test_a_cut_leaves_the_record_of_before_or_the_new_one(tmp_path: Path) -> None:
    begun: list[str] = []

    def check(state: State) -> None:
        if begun or "stages/stages.json" in state:
            names = list(json.loads(state["stages/stages.json"])["stages"])
            assert names[: len(begun)] == begun

    record = StageRecord(tmp_path / "stages", must_exist=False)
    with power_cuts(tmp_path, check):
        for name in ("first", "second"):
            record.begin(name, {"recipe": name})
            begun.append(name)
