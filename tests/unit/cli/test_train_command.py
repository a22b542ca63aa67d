# SPDX-License-Identifier: Apache-2.0
"""The commands ``train`` and ``run``: what was typed becomes the arguments of the entrypoint."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from llmcompressor.args.parsing import RENAMED, current_name
from llmcompressor.cli.app import app
from llmcompressor.cli.commands import OPTIONS

TRAIN = ["train", "model", "--dataset", "data.jsonl", "--output", "out"]
RUN = ["run", "model", "--recipe", "recipe.yaml", "--output", "out"]


class Entrypoint:
    """Takes the place of an entrypoint and notes its arguments."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.do: Callable[[], Any] = lambda: None

    def __call__(self, **given: Any) -> Any:
        self.given = given
        return self.do()

    def fail(self, error: BaseException) -> None:
        def do() -> None:
            raise error

        self.do = do


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="llmcompressor", color=False)


@pytest.fixture(autouse=True)
def _log_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcompressor.logger.configure_logger", lambda *_: None)


def _replaced(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> Entrypoint:
    entrypoint = Entrypoint()
    page = ModuleType(f"llmcompressor.entrypoints.{module}")
    setattr(page, name, entrypoint)
    monkeypatch.setitem(sys.modules, page.__name__, page)
    return entrypoint


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Entrypoint:
    return _replaced(monkeypatch, "train", "train")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Entrypoint:
    return _replaced(monkeypatch, "stages", "run_stages")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["--recipe", "r.yaml", "--recipe-args", "a=1"], {"recipe_args": ["a=1"]}),
        (["--num-train-epochs", "0.5"], {"num_train_epochs": 0.5}),
        (["--max-steps", "7"], {"max_steps": 7}),
        (["--learning-rate", "1e-4"], {"learning_rate": 1e-4}),
        (["--bf16", "--activation-checkpointing"], {"activation_checkpointing": True}),
        (["--bf16", "--gradient-checkpointing"], {"bf16": True, "activation_checkpointing": True}),
        (
            ["--report-to", "wandb", "--report-to", "tensorboard"],
            {"report_to": ["wandb", "tensorboard"]},
        ),
        (["--seed", "3"], {"seed": 3}),
        (["--data-collator", "truncation"], {"data_collator": "truncation"}),
        (["--splits", "train[:90%]", "--splits", "test"], {"splits": ["train[:90%]", "test"]}),
        (
            ["--splits", "train=train[:150]", "--splits", "eval=train[150:160]"],
            {"splits": {"train": "train[:150]", "eval": "train[150:160]"}},
        ),
        (["--distill-teacher", "large"], {"distill_teacher": "large"}),
        (["--resume-from-checkpoint", "true"], {"resume_from_checkpoint": "true"}),
        (["--resume", "never", "--no-verify"], {"resume": "never", "verify": False}),
        (["--set", "adam_beta2=0.95"], {"adam_beta2": 0.95}),
        (
            ["--set", "optim_args=x=1", "--set", 'lr_scheduler_kwargs={"min_lr": 0.1}'],
            {"optim_args": "x=1", "lr_scheduler_kwargs": {"min_lr": 0.1}},
        ),
    ],
)
def test_an_option_becomes_the_argument(
    train: Entrypoint, typed: list[str], expected: dict[str, Any]
) -> None:
    result = run(*TRAIN, *typed)
    assert result.exit_code == 0, result.stderr
    assert {key: train.given[key] for key in expected} == expected


def test_run_takes_arguments_of_both_kinds(stages: Entrypoint) -> None:
    typed = ["--num-calibration-samples", "8", "--max-steps", "3", "--batch-size", "2"]
    result = run(*RUN, *typed, "--set", "adam_beta2=0.9")
    assert result.exit_code == 0, result.stderr
    assert stages.given == {
        "model": "model",
        "recipe": "recipe.yaml",
        "output_dir": "out",
        "num_calibration_samples": 8,
        "batch_size": 2,
        "max_steps": 3,
        "adam_beta2": 0.9,
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*TRAIN, "--learning-rat", "x"], "--learning-rate"),
        ([*TRAIN, "--learning-rate", "much"], "--learning-rate"),
        ([*TRAIN, "--set", "adam_beta2"], "--set"),
        ([*TRAIN, "--max-steps", "3", "--set", "max_steps=4"], "max_steps is given twice"),
        (
            [*TRAIN, "--activation-checkpointing", "--set", "gradient_checkpointing=false"],
            "gradient_checkpointing is given twice",
        ),
        ([*TRAIN, "--set", "dataset=other"], "dataset is given twice"),
        (["train", "model"], "--output"),
        (["run", "model", "--output", "out"], "--recipe"),
        ([*RUN, "--stage", "one"], "--stage"),
    ],
)
def test_wrong_use_names_the_remedy(
    train: Entrypoint, stages: Entrypoint, arguments: list[str], named: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.stderr.split())
    assert not train.given
    assert not stages.given


@pytest.mark.parametrize("typed", [TRAIN, RUN])
def test_an_interrupt_says_how_to_continue(
    train: Entrypoint, stages: Entrypoint, typed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/llmcompressor", *typed])
    for entrypoint in (train, stages):
        entrypoint.fail(KeyboardInterrupt())
    result = run(*typed)
    assert result.exit_code == 130
    assert result.stderr == f"Interrupted. Continue with: llmcompressor {' '.join(typed)}\n"


def test_options_are_arguments_with_the_defaults_that_they_state() -> None:
    """The table stands beside transformers' dataclass, which ``--help`` does not load."""
    from llmcompressor.args import DatasetArguments, TrainingArguments

    fields = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    made = TrainingArguments()
    names = {name: current_name(fields, name) for name in OPTIONS}
    assert set(names.values()) - set(fields) == {"data_collator"}
    assert set(OPTIONS).isdisjoint(RENAMED), "options have the newest names"
    assert {field.name for field in dataclasses.fields(DatasetArguments)} & set(OPTIONS) == {
        "data_collator",
        "seed",
    }
    for name, option in OPTIONS.items():
        stated = option.help.rpartition("(default: ")[2].removesuffix(")")
        default = fields[names[name]].default if names[name] in fields else None
        if isinstance(default, int | float) and stated != option.help:
            assert float(stated) == default, name
        elif option.type is bool:
            assert getattr(made, names[name]) is False, name
