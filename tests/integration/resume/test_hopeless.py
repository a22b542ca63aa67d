# SPDX-License-Identifier: Apache-2.0
"""What no call could go on from is not left behind; what a run cannot work in is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.killed_runs import rows, tree, write_model

from llmcompressor import oneshot
from llmcompressor.checkpoint import journal
from llmcompressor.errors import OutputError, TargetError
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier


def call(model: Path, output: Path, recipe: Any = None, **arguments: Any) -> None:
    oneshot(
        model=str(model),
        recipe=recipe or GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
        dataset=rows(),
        output_dir=str(output),
        verify=False,
        **arguments,
    )


def committed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks that a run finishes, as it does."""
    blocks: list[str] = []
    add = journal.Journal.add

    def watched(self: journal.Journal, entry: journal.BlockEntry) -> None:
        add(self, entry)
        blocks.append(entry.block)

    monkeypatch.setattr(journal.Journal, "add", watched)
    return blocks


def test_a_module_that_no_batch_reaches_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")

    def unreached(self: Any, *args: Any, **kwargs: Any) -> None:
        raise TargetError("No calibration batch reached x.", "Add data.")

    blocks = committed(monkeypatch)
    monkeypatch.setattr(
        "llmcompressor.pipelines.block_loading.BlockLoader.finish_unvisited", unreached
    )
    with pytest.raises(TargetError, match="No calibration batch"):
        call(model, tmp_path / "output")
    assert blocks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def replace_by_file(path: Path) -> None:
    if path.is_dir():
        path.rename(path.with_name("aside"))
    path.write_text("x")


def replace_by_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("", replace_by_file),
        ("files", replace_by_file),
        ("scratch", replace_by_file),
        ("journal", replace_by_folder),
        ("lock", replace_by_folder),
    ],
)
def test_a_file_for_a_folder_is_one_clear_error(
    name: str, damage: Callable[[Path], None], resume: str, tmp_path: Path
) -> None:
    model, partial = write_model(tmp_path / "model"), tmp_path / "output.partial"
    (partial / "files").mkdir(parents=True)
    journal.Journal(partial / "journal").begin({"recipe": "a"})
    damage(partial / name if name else partial)
    before = tree(tmp_path)
    recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    with pytest.raises(OutputError, match="part of a run's progress") as caught:
        call(model, tmp_path / "output", recipe, resume=resume)
    assert f"{partial / name} is a" in str(caught.value)
    assert f"Remove {partial}" in str(caught.value)
    assert tree(tmp_path) == before
