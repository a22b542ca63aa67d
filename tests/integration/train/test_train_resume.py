# SPDX-License-Identifier: Apache-2.0
"""A training that was broken off ends with the bytes of one that nothing interrupted."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from tests.support.killed_runs import killed_at_the_last_step
from tests.support.thinned import few
from tests.support.training_cases import QUANTIZE, Breaker, Freezer, arguments

from llmcompressor import train
from llmcompressor.checkpoint.journal import Workspace
from llmcompressor.entrypoints import training_task
from llmcompressor.errors import CheckpointError, OutputError
from llmcompressor.recipe import Recipe
from llmcompressor.training import Trainer

STEPS = 5


def _given(output: Path, **changes: Any) -> dict[str, Any]:
    return arguments(output, max_steps=STEPS, save_steps=2, logging_steps=1, **changes)


def _recipe() -> list[Any]:
    return [Freezer(), *Recipe.create_instance(QUANTIZE).modifiers, Breaker()]


def _kept(output: Path) -> dict[str, str]:
    """The files whose bytes do not depend on the time that something took."""
    names = ("model.safetensors", "config.json", "recipe.yaml", "generation_config.json")
    return {name: value for name, value in small.tree(output).items() if name in names}


@pytest.fixture(scope="module")
def whole(one_block: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("whole") / "out"
    train(str(one_block), _recipe(), **_given(output))
    return _kept(output)


def _break(folder: Path, output: Path, at: int) -> None:
    Breaker.at = at
    try:
        with pytest.raises(KeyboardInterrupt):
            train(str(folder), _recipe(), **_given(output))
    finally:
        Breaker.at = None


@pytest.mark.parametrize("at", few([1, 2, 4], 1, 4))
def test_interrupted_at_any_step(
    at: int, whole: dict[str, str], one_block: Path, tmp_path: Path, said: list[str]
) -> None:
    output = tmp_path / "out"
    _break(one_block, output, at)
    assert not output.exists()
    assert (tmp_path / "out.partial").exists() == (at >= 2), "kept if there is a checkpoint"
    train(str(one_block), _recipe(), **_given(output))
    assert any("checkpoint-" in line and "Continuing" in line for line in said) == (at >= 2)
    assert not any("begins anew" in line for line in said), "nothing is kept without a checkpoint"
    assert _kept(output) == whole
    assert list(tmp_path.iterdir()) == [output]


def test_killed_before_the_first_checkpoint(
    whole: dict[str, str], one_block: Path, tmp_path: Path, said: list[str]
) -> None:
    """What a process leaves that had no time to clean up."""
    output = tmp_path / "out"
    _break(one_block, output, 2)
    left = tmp_path / "out.partial"
    lines = (left / "journal").read_text().splitlines(keepends=True)
    (left / "journal").write_text(lines[0])
    shutil.rmtree(left / "training" / "checkpoint-2")
    train(str(one_block), _recipe(), **_given(output))
    assert any("No checkpoint was written" in line and "begins anew" in line for line in said)
    assert _kept(output) == whole


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 0x10
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGE = {
    "model.safetensors": _flip,
    "optimizer.pt": Path.unlink,
    "session_state.pt": _truncate,
}


def test_damaged_checkpoints_give_way_to_the_newest_whole_one(
    whole: dict[str, str], one_block: Path, tmp_path: Path, said: list[str]
) -> None:
    output = tmp_path / "out"
    _break(one_block, output, 4)
    training = tmp_path / "out.partial" / "training"
    assert sorted(path.name for path in training.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    kept = shutil.copytree(tmp_path / "out.partial", tmp_path / "kept")
    for name, damage in DAMAGE.items():
        damage(training / "checkpoint-4" / name)
        said.clear()
        named = str(output / "checkpoint-4")
        with pytest.raises(CheckpointError, match=f"{name} "):
            train(str(one_block), _recipe(), **_given(output, resume_from_checkpoint=named))
        train(str(one_block), _recipe(), **_given(output))
        assert any("checkpoint-4" in line and f"{name} " in line for line in said)
        assert any("Continuing" in line and "checkpoint-2" in line for line in said)
        assert _kept(output) == whole
        shutil.rmtree(output)
        shutil.copytree(kept, tmp_path / "out.partial")


def test_another_processor_is_refused_unless_digits_may_mix(
    one_block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    _break(one_block, output, 2)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    with pytest.raises(OutputError, match=r"instructions: \S+ then, OTHER now.*mixed"):
        train(str(one_block), _recipe(), **_given(output))
    train(str(one_block), _recipe(), **_given(output, resume="mixed"))
    report = json.loads((output / "compression_report.json").read_text())
    assert [one["instructions"] == "OTHER" for one in report["processors"]] == [False, True]


def test_torn_metrics_of_the_end_are_written_again(
    whole: dict[str, str], one_block: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    _break(one_block, output, 4)
    for name in ("all_results.json", "train_results.json", "trainer_state.json"):
        (tmp_path / "out.partial" / "training" / name).write_text('{"train_lo')
    train(str(one_block), _recipe(), **_given(output))
    assert _kept(output) == whole
    assert json.loads((output / "all_results.json").read_text())["train_loss"]


def test_a_checkpoint_can_be_named(whole: dict[str, str], one_block: Path, tmp_path: Path) -> None:
    """By the name that it would have in the output, while the training is not done."""
    output = tmp_path / "out"
    _break(one_block, output, 4)
    named = str(output / "checkpoint-2")
    train(str(one_block), _recipe(), **_given(output, resume_from_checkpoint=named))
    assert _kept(output) == whole


def _die_after_first_checkpoint(folder: str, output: str) -> None:
    note = training_task.TrainingFolder.note

    def noted(self: Any, step: int) -> None:
        note(self, step)
        os.kill(os.getpid(), signal.SIGKILL)

    training_task.TrainingFolder.note = noted  # type: ignore[method-assign]
    train(folder, _recipe(), **_given(Path(output)))


def test_killed(whole: dict[str, str], one_block: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    context = multiprocessing.get_context("forkserver")
    process = context.Process(
        target=_die_after_first_checkpoint, args=(str(one_block), str(output))
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    # one that was being written when it died, and is in no journal
    (tmp_path / "out.partial" / "training" / "checkpoint-4").mkdir()
    train(str(one_block), _recipe(), **_given(output))
    assert _kept(output) == whole


@pytest.mark.parametrize(
    ("step", "keep"), [("publish", True), ("publish", False), ("remove", True)]
)
def test_broken_off_when_all_is_written(
    step: str,
    keep: bool,
    whole: dict[str, str],
    one_block: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trains no step again, and loses neither the output nor a checkpoint."""
    given = _given(tmp_path / "out") | ({} if keep else {"save_strategy": "no"})

    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, killed_at_the_last_step():
        if step == "publish":
            patch.setattr(Workspace, "publish", broken)
        train(str(one_block), _recipe(), **given)
    assert (tmp_path / "out.partial").is_dir()
    monkeypatch.setattr(Trainer, "train", lambda *_, **__: pytest.fail("it trains again"))
    model = train(str(one_block), _recipe(), **given)
    assert _kept(tmp_path / "out") == whole
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == STEPS
    assert (tmp_path / "out" / "checkpoint-4").is_dir() == keep
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
