# SPDX-License-Identifier: Apache-2.0
"""transformers as the engine: from the command, and in its own process at the end of a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.in_process import run_here
from tests.support.short_pico import write_short_pico

from llmcompressor import model_free_ptq, oneshot, reset_session, train
from llmcompressor.cli import main
from llmcompressor.engines import check
from llmcompressor.engines.process import Answer
from llmcompressor.entrypoints.stages import run_stages
from llmcompressor.errors import ArgumentError
from llmcompressor.modifiers.pruning import ConstantPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

RECIPE = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])


@pytest.fixture(scope="module")
def model(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_pico(pico, tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is verified with the engine."""
    folder = tmp_path_factory.mktemp("engine") / "W8A8"
    reset_session()
    oneshot(str(model), RECIPE, output_dir=folder, verify_with="transformers")
    return folder


def test_a_run_tells_what_the_engine_gave(made: Path) -> None:
    told = json.loads((made / "compression_report.json").read_text())
    engine = json.dumps(told)
    assert '"engine": {"engine": "transformers", "status": "run"' in engine


def test_a_manifest_does_not_tell_of_the_engine(made: Path) -> None:
    """It decides no byte of the weights."""
    assert "verify_with" not in (made / "manifest.json").read_text()


def test_a_run_without_a_model_class(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    given = ["--scheme", "W8A8", "--verify-with", "transformers", "--ignore", "lm_head"]
    with pytest.raises(SystemExit) as ended:
        main(["model-free-ptq", str(model), "--output", str(tmp_path / "output"), *given])
    assert ended.value.code == 0
    told = json.loads((tmp_path / "output" / "compression_report.json").read_text())
    assert '"engine": {"engine": "transformers", "status": "run"' in json.dumps(told)
    assert "verify_with" not in (tmp_path / "output" / "manifest.json").read_text()


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The time limits of the engines that are asked, each of which takes too long."""
    given: list[float | None] = []

    def run_job(job: object, folder: Path, python: str, timeout: float | None) -> Answer:
        given.append(timeout)
        return Answer("loading", "it was not done after 5 seconds", is_late=True)

    monkeypatch.setattr(check, "run_job", run_job)
    return given


COMMANDS = {
    "oneshot": ["oneshot", "MODEL", "--recipe", "RECIPE"],
    "run": ["run", "MODEL", "--recipe", "RECIPE"],
    "model-free-ptq": ["model-free-ptq", "MODEL", "--scheme", "W8A8", "--ignore", "lm_head"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_time_that_an_engine_has(
    command: str, model: Path, tmp_path: Path, seconds: list[float | None]
) -> None:
    """It is no part of the identity of a run, nor of its manifest."""
    recipe = {"modifiers": {"QuantizationModifier": {"targets": "Linear", "scheme": "W8A8"}}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    places = {"MODEL": str(model), "RECIPE": str(tmp_path / "recipe.json")}
    given = [places.get(one, one) for one in COMMANDS[command]]
    given += ["--output", str(tmp_path / "output"), "--verify-with", "transformers"]
    reset_session()
    with pytest.raises(SystemExit) as ended:
        main([*given, "--verify-timeout", "5"])
    assert ended.value.code == 0
    assert seconds == [5.0]
    [manifest] = (tmp_path / "output").rglob("manifest.json")
    assert "verify_timeout" not in manifest.read_text()


def test_the_time_that_an_engine_has_after_a_training(
    model: Path, tmp_path: Path, seconds: list[float | None]
) -> None:
    reset_session()
    train(
        model=str(model),
        recipe=ConstantPruningModifier(targets=["Linear"], start=0),
        dataset=[{"text": "one two three"}],
        max_steps=1,
        output_dir=tmp_path / "output",
        verify_with="transformers",
        verify_timeout=7,
    )
    assert seconds == [7.0]


KILLED = """
import os, pathlib, signal, sys
from tests.support.in_process import answer
from llmcompressor import oneshot
from llmcompressor.engines import check
def run_job(job, folder, *_):
    if folder.name == "job-decoded":
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(job)
check.run_job = run_job
model, output, scheme = sys.argv[1:]
recipe = {"modifiers": {"QuantizationModifier": {"targets": "Linear", "scheme": scheme}}}
oneshot(model, recipe, output_dir=output, verify_with="transformers")
"""


def test_killed_while_the_engine_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run of the same output leaves nothing of it: no decoded model, no unfinished one."""
    scratch = tmp_path / "temporary"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    output = tmp_path / "runs" / "output"
    command = [sys.executable, "-c", KILLED, str(model), str(output), "W8A8"]
    ended = subprocess.run(command, check=False, cwd=Path(__file__).parents[3], timeout=200)
    assert ended.returncode == -signal.SIGKILL
    assert [one.name for one in scratch.glob("llmcompressor-engine-*/*")]
    assert [one.name for one in output.parent.iterdir()] == ["output.partial"]
    run_here(monkeypatch)
    recipe = {"modifiers": {"QuantizationModifier": {"targets": "Linear", "scheme": "W8A8"}}}
    reset_session()
    oneshot(str(model), recipe, output_dir=output, verify_with="transformers")
    assert [one.name for one in output.parent.iterdir()] == ["output"]
    assert not list(scratch.glob("llmcompressor-*"))


def test_the_command(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(made), "--with", "transformers", "--json"])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "good"
    assert told["engine"]["modules"] == 7 + 2
    assert told["engine"]["decoded"]["kl"] < 0.01


def test_the_command_without_the_engine(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(made), "--with", "sglang"])
    assert ended.value.code == 2
    assert "has no sglang" in capsys.readouterr().err


WRONG: tuple[dict[str, Any], ...] = (
    {"verify_with": "vlm"},
    {"verify_python": "python"},
    {"verify_timeout": 9},
    {"verify_with": "transformers", "verify_timeout": 0},
    {"verify_with": "transformers", "verify_timeout": "soon"},
)


@pytest.mark.parametrize("further", WRONG)
def test_an_engine_is_looked_for_before_any_work(
    further: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    for run in (oneshot, run_stages):
        with pytest.raises(ArgumentError, match=r"engine|verify_timeout"):
            run(str(model), RECIPE, output_dir=tmp_path / "output", **further)
    with pytest.raises(ArgumentError, match=r"engine|verify_timeout"):
        model_free_ptq(str(model), tmp_path / "output", "W8A8", **further)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("further", [{"verify": False, "output_dir": "out"}, {}])
def test_there_has_to_be_something_to_verify(further: dict[str, object], model: Path) -> None:
    with pytest.raises(ArgumentError, match="to be verified with transformers, and"):
        oneshot(str(model), RECIPE, verify_with="transformers", **further)
