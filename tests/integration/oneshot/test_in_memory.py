# SPDX-License-Identifier: Apache-2.0
"""Runs with the whole model in memory keep others away from their output, and lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import small_models as small
from tests.support.killed_runs import killed_at_the_last_step
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.checkpoint.journal import BlockEntry, open_workspace
from llmcompressor.errors import OutputError
from llmcompressor.modifiers.quantization import QuantizationModifier


class Meanwhile(QuantizationModifier):
    """Lets something happen while the run is at work."""

    def on_finalize(self, state: Any, **kwargs: Any) -> bool:
        for act in ACTS:
            act()
        return super().on_finalize(state, **kwargs)


ACTS: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_happens() -> None:
    ACTS.clear()


def compress(output: Path, **changed: Any) -> Any:
    recipe = Meanwhile(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
    return oneshot(model=small.llama(), recipe=recipe, output_dir=output, **changed)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_run_on_one_output_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    refused = []

    def second() -> None:
        ACTS.clear()
        with pytest.raises(OutputError, match=r"Another run \(process \d+\) is writing"):
            compress(output)
        refused.append(names(tmp_path))

    ACTS.append(second)
    compress(output)
    assert refused == [["out.partial"]], "the first one's folder is as it was"
    assert names(tmp_path) == ["out"]
    assert verify(output).ok


def test_progress_of_another_run_is_kept_unless_unwanted(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with open_workspace(output, {"model": "another"}) as workspace:
        workspace.journal.add(BlockEntry("layers.0", digest="d", source="s"))
    kept = (tmp_path / "out.partial" / "journal").read_bytes()
    with pytest.raises(OutputError, match=r"out\.partial holds the progress of another run"):
        compress(output)
    assert (tmp_path / "out.partial" / "journal").read_bytes() == kept
    assert not output.exists()
    compress(output, resume="never")
    assert names(tmp_path) == ["out"]


def test_a_result_whose_place_was_taken_is_kept_beside_it(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def take() -> None:
        output.mkdir()
        (output / "thesis.tex").write_text("theirs")

    ACTS.append(take)
    with pytest.raises(OutputError, match=r"What was made stands in .*out\.finished"):
        compress(output)
    assert names(tmp_path) == ["out", "out.finished"]
    assert names(output) == ["thesis.tex"]
    assert verify(tmp_path / "out.finished").ok
    AutoModelForCausalLM.from_pretrained(tmp_path / "out.finished")


def test_a_run_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("broken")

    ACTS.append(fail)
    with pytest.raises(ValueError, match="broken"):
        compress(tmp_path / "deep" / "er" / "out")
    assert names(tmp_path) == []


def test_killed_at_its_last_step_it_is_said_to_be_whole(tmp_path: Path) -> None:
    """The call loads no model again to find its own output in the way, and leaves nothing."""
    output = tmp_path / "out"
    with killed_at_the_last_step():
        compress(output)
    assert names(tmp_path) == ["out", "out.partial"]
    with pytest.raises(OutputError, match=r"when all of them had their names.*is complete"):
        compress(output)
    assert names(tmp_path) == ["out"]
    assert verify(output).ok
