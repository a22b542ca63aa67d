# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import inspect
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import llmcompressor
from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments
from llmcompressor.cli.app import _evaluate, app
from llmcompressor.errors import RecipeError
from llmcompressor.evaluation.metrics import Report

REPORT = Report(100, 4, 2.0, reference_loss=1.5, kl_divergence=0.25, top1_agreement=0.875)
ONESHOT = ["oneshot", "model", "--recipe", "recipe.yaml", "--output", "out"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="llmcompressor", color=False)


class Entrypoint:
    """Takes the place of an entrypoint: notes its arguments, and does what it is told."""

    def __init__(self) -> None:
        self.positional: tuple[Any, ...] = ()
        self.given: dict[str, Any] = {}
        self.do: Callable[[], Any] = lambda: None

    def __call__(self, *positional: Any, **given: Any) -> Any:
        self.positional, self.given = positional, given
        return self.do()

    def fail(self, error: BaseException) -> None:
        def do() -> None:
            raise error

        self.do = do


def replaced(monkeypatch: pytest.MonkeyPatch, name: str) -> Entrypoint:
    entrypoint = Entrypoint()
    module = ModuleType(f"llmcompressor.entrypoints.{name}")
    setattr(module, name, entrypoint)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return entrypoint


@pytest.fixture(autouse=True)
def _log_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcompressor.logger.configure_logger", lambda *_: None)


@pytest.fixture
def oneshot(monkeypatch: pytest.MonkeyPatch) -> Entrypoint:
    return replaced(monkeypatch, "oneshot")


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Entrypoint:
    entrypoint = replaced(monkeypatch, "evaluate")
    entrypoint.do = lambda: REPORT
    return entrypoint


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"llmcompressor {llmcompressor.__version__}\n")


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("oneshot", "evaluate", "demo"):
        assert command in result.stdout
    assert "..." not in result.stdout.split("Commands:")[1], "a description that is cut off"


def test_only_what_was_given_is_passed_on(oneshot: Entrypoint) -> None:
    result = run(*ONESHOT)
    assert result.exit_code == 0, result.stderr
    assert oneshot.given == {"model": "model", "recipe": "recipe.yaml", "output_dir": "out"}
    assert "out" in result.stdout


def test_statistics_alone_need_neither_recipe_nor_output(oneshot: Entrypoint) -> None:
    result = run("oneshot", "model", "--dataset", "default", "--save-statistics", "kept")
    assert result.exit_code == 0, result.stderr
    assert oneshot.given == {"model": "model", "dataset": "default", "save_statistics": "kept"}
    assert result.stdout == "Written: kept\n"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["--num-calibration-samples", "64"], {"num_calibration_samples": 64}),
        (["--num-calibration-samples", "none"], {"num_calibration_samples": None}),
        (["--max-seq-length", "256"], {"max_seq_length": 256}),
        (["--activation-budget", "8GiB"], {"activation_budget": "8GiB"}),
        (["--min-tokens-per-module", "0.5"], {"min_tokens_per_module": 0.5}),
        (["--no-shuffle-calibration-samples"], {"shuffle_calibration_samples": False}),
        (["--streaming"], {"streaming": True}),
        (["--splits", "train[:5%]"], {"splits": "train[:5%]"}),
        (["--splits", "a", "--splits", "b"], {"splits": ["a", "b"]}),
        (["--sequential-targets", "A,B"], {"sequential_targets": ["A", "B"]}),
        (
            ["--sequential-targets", "re:.*x{1,2}", "--sequential-targets", "B"],
            {"sequential_targets": ["re:.*x{1,2}", "B"]},
        ),
        (["--recipe-args", "a=1,2", "--recipe-args", "b=x"], {"recipe_args": ["a=1,2", "b=x"]}),
        (
            ["--raw-kwargs", "n=2", "--raw-kwargs", "s=x"],
            {"raw_kwargs": {"n": 2, "s": "x"}},
        ),
        (["--use-auth-token", "true"], {"use_auth_token": True}),
        (["--use-auth-token", "secret"], {"use_auth_token": "secret"}),
        (["--log-dir", "logs"], {"log_dir": "logs"}),
        (["--statistics", "kept"], {"statistics": "kept"}),
    ],
)
def test_an_option_becomes_the_argument(
    oneshot: Entrypoint, typed: list[str], expected: dict[str, Any]
) -> None:
    result = run(*ONESHOT, *typed)
    assert result.exit_code == 0, result.stderr
    assert {key: oneshot.given[key] for key in expected} == expected


def test_every_argument_is_an_option() -> None:
    result = CliRunner().invoke(app, ["oneshot", "--help"], env={"COLUMNS": "200"}, color=False)
    for arguments in (ModelArguments, DatasetArguments, RecipeArguments):
        for field in dataclasses.fields(arguments):
            dashed = field.name.replace("_", "-")
            options = {f"--{dashed}", f"--no-{dashed}"}
            assert field.name == "model" or options & set(result.stdout.replace(",", " ").split())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*ONESHOT, "--recpie", "x"], "--recipe"),
        (["oneshto"], "oneshot"),
        (["oneshot", "model", "--output", "out"], "--recipe"),
        (["oneshot", "model", "--recipe", "r"], "--output"),
        (["oneshot", "model", "--recipe", "r", "--save-statistics", "kept"], "--output"),
        (["train", "model", "--recipe", "r", "-o", "out", "--statistics", "kept"], "--statistics"),
        (["oneshot"], "MODEL"),
        ([*ONESHOT, "--max-seq-length", "long"], "--max-seq-length"),
        ([*ONESHOT, "--num-calibration-samples", "many"], "--num-calibration-samples"),
        ([*ONESHOT, "--raw-kwargs", "x"], "--raw-kwargs"),
        (["evaluate", "m", "--dataset", "a", "--text-file", "b"], "--text-file"),
        (["evaluate", "m", "--text-file", "nothing"], "nothing"),
    ],
)
def test_wrong_use_names_the_remedy(oneshot: Entrypoint, arguments: list[str], named: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert not oneshot.given


def test_the_unforeseen_is_one_paragraph_with_a_hint(oneshot: Entrypoint) -> None:
    oneshot.fail(KeyError("layer"))
    result = run(*ONESHOT)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "KeyError: 'layer'" in result.stderr
    assert "--debug" in result.stderr


def test_a_file_without_permission(oneshot: Entrypoint) -> None:
    oneshot.fail(PermissionError(13, "Permission denied", "model/config.json"))
    result = run(*ONESHOT)
    assert result.exit_code == 2
    assert "no permission for model/config.json" in result.stderr
    assert "Change its permissions" in result.stderr


@pytest.mark.parametrize("error", [RecipeError("No."), KeyError("layer")])
def test_the_traceback_comes_with_debug_only(oneshot: Entrypoint, error: Exception) -> None:
    oneshot.fail(error)
    assert "Traceback" not in run(*ONESHOT).stderr
    assert "Traceback" in run(*ONESHOT, "--debug").stderr


def test_an_interrupt(oneshot: Entrypoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/llmcompressor", *ONESHOT, "--log-dir", "my logs"])
    oneshot.fail(KeyboardInterrupt())
    result = run(*ONESHOT)
    assert result.exit_code == 130
    command = f"llmcompressor {' '.join(ONESHOT)} --log-dir 'my logs'"
    assert result.stderr == f"Interrupted. Continue with: {command}\n"


@pytest.mark.parametrize("never", [["--resume", "never"], ["--resume=never"]])
def test_what_continues_does_not_begin_anew(
    oneshot: Entrypoint, monkeypatch: pytest.MonkeyPatch, never: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/llmcompressor", *ONESHOT, *never, "--overwrite"])
    oneshot.fail(KeyboardInterrupt())
    command = f"llmcompressor {' '.join(ONESHOT)} --overwrite"
    assert run(*ONESHOT).stderr == f"Interrupted. Continue with: {command}\n"


def test_a_termination_is_an_interrupt_with_its_own_exit_code(
    oneshot: Entrypoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # once more while it cleans up

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["/bin/llmcompressor", *ONESHOT])
    oneshot.do = die
    result = run(*ONESHOT)
    assert result.exit_code == 143
    assert result.stderr == f"Terminated. Continue with: llmcompressor {' '.join(ONESHOT)}\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_evaluate_passes_its_options_on(evaluate: Entrypoint, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    result = run("evaluate", "a", "--reference", "b", "--text-file", str(text), "--seed", "4")
    assert result.exit_code == 0, result.stderr
    assert evaluate.positional == ("a",)
    assert evaluate.given["reference"] == "b"
    assert evaluate.given["dataset"] == text
    assert evaluate.given["seed"] == 4


def test_evaluate_passes_tasks_on(evaluate: Entrypoint, tmp_path: Path) -> None:
    tasks = ["--tasks", "gsm8k,mmlu_*", "--limit", "8", "--num-fewshot", "0"]
    result = run("evaluate", "a", *tasks, "--include-path", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    expected = {"tasks": "gsm8k,mmlu_*", "limit": 8, "num_fewshot": 0, "include_path": tmp_path}
    assert {name: evaluate.given[name] for name in expected} == expected


def test_options_have_the_defaults_of_evaluate() -> None:
    """The command states defaults of its own, for the help: they must be the entrypoint's."""
    from llmcompressor.entrypoints.evaluate import evaluate as entrypoint

    stated = inspect.signature(_evaluate).parameters
    for name, parameter in inspect.signature(entrypoint).parameters.items():
        assert stated[name].default == parameter.default, name
