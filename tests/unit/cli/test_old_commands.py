# SPDX-License-Identifier: Apache-2.0
"""Commands of other releases: what is made, and what is said."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from tests.house import ROOT

from llmcompressor.cli import old_commands
from llmcompressor.cli.old_commands import reindex, trace
from llmcompressor.runtime.registry import resolve


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "code").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "code" / "own.py").write_text("x = 1")
    (tmp_path / "blob").write_bytes(b"weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")  # as in the hub's cache
    return folder


def test_the_folder_for_the_next_step_is_a_copy(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reindex([str(model), str(tmp_path / "new"), "--num_workers=10"])
    said = capsys.readouterr().out
    assert "not needed" in said
    made = tmp_path / "new"
    assert sorted(str(one.relative_to(made)) for one in made.rglob("*") if one.is_file()) == [
        "code/own.py",
        "config.json",
        "model.safetensors",
    ]
    weights = made / "model.safetensors"
    assert not weights.is_symlink()
    weights.write_bytes(b"changed")
    assert (tmp_path / "blob").read_bytes() == b"weights"
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


def test_nothing_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        trace(["--model_id", "x"])
    assert left.value.code == 2
    assert "llmcompressor plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "typed", "line"),
    [
        (
            "oneshot",
            "--model m --output_dir o --recipe=r --num_calibration_samples 10 --bf16 False "
            "--pad_to_max_length False --shuffle_calibration_samples False --oneshot_device cpu",
            "oneshot m --output-dir o --recipe r --num-calibration-samples 10 "
            "--no-shuffle-calibration-samples --device cpu",
        ),
        (
            "train",
            "--model m --output_dir o --gradient_checkpointing --num_calibration_samples 8 "
            "--save_safetensors False --logging_first_step True --report_to none wandb",
            "train m --output-dir o --activation-checkpointing --set logging_first_step=true "
            "--report-to none --report-to wandb",
        ),
        ("run", "--num_calibration_samples 8 --model m", "run m --num-calibration-samples 8"),
        ("run", "--model m -h", "run --help"),
    ],
)
def test_an_old_command_runs_under_its_present_name(
    command: str,
    typed: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(old_commands, "main", run.append)
    getattr(old_commands, command)(typed.split())
    assert run == [line.split()]
    assert capsys.readouterr().err == f"This command is now: llmcompressor {line}\n"


def test_each_command_is_a_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    commands = project["scripts"]
    assert resolve(commands["llmcompressor.reindex_fused_weights"]) is reindex
    assert resolve(commands["llmcompressor.trace"]) is trace
    old = {name: resolve(home) for name, home in commands.items() if "text_generation" in name}
    assert len(old) == 6
    assert all(one.__module__ == old_commands.__name__ for one in old.values())
