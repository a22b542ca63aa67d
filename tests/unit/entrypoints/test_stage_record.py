# SPDX-License-Identifier: Apache-2.0
"""The record of stages, whatever happens while it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.power_cuts import State, power_cuts

from llmcompressor.entrypoints.stages import StageRecord
from llmcompressor.errors import OutputError


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


def test_a_record_that_was_not_begun_to_its_end_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "stages.json.new").write_text('{"stages": {"fi')
    StageRecord(tmp_path, must_exist=False).begin("first", {"recipe": "first"})
    assert [path.name for path in tmp_path.iterdir()] == ["stages.json"]
    (tmp_path / "stages.json").rename(tmp_path / "other.json")
    with pytest.raises(OutputError, match="no stages"):
        StageRecord(tmp_path, must_exist=False)
