# SPDX-License-Identifier: Apache-2.0
"""What entrypoints show of their arguments: all that they take, as they take it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pydoc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import llmcompressor
from llmcompressor import Oneshot, entrypoints, oneshot, train
from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    RunArguments,
    TrainingArguments,
    parse_arguments,
)
from llmcompressor.errors import ArgumentError
from llmcompressor.observers import canonical
from llmcompressor.pipelines import batches

COMMON = (ModelArguments, RecipeArguments, DatasetArguments, RunArguments)
CASES: dict[Callable[..., Any], tuple[tuple[type, ...], list[str]]] = {
    oneshot: (COMMON, ["model", "recipe", "dataset", "output_dir", "log_dir"]),
    Oneshot: (COMMON, ["output_dir", "log_dir"]),
    train: (
        (*COMMON, TrainingArguments),
        ["model", "recipe", "dataset", "output_dir"],
    ),
}
ENTRYPOINTS = ["oneshot", "train", "plan", "run_stages", "evaluate", "verify", "model_free_ptq"]
OWN = {"output_dir", "log_dir", "loggers"}


@pytest.fixture(params=CASES, ids=lambda entrypoint: entrypoint.__name__)
def entrypoint(request: pytest.FixtureRequest) -> Callable[..., Any]:
    found: Callable[..., Any] = request.param
    return found


def shown(entrypoint: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Its parameters; the last one takes the names of earlier releases."""
    found = dict(inspect.signature(entrypoint).parameters)
    assert found.pop("arguments").kind == inspect.Parameter.VAR_KEYWORD
    return found


def test_everything_that_is_taken_is_shown_and_nothing_else(
    entrypoint: Callable[..., Any],
) -> None:
    classes, _ = CASES[entrypoint]
    taken = {one.name for cls in classes for one in dataclasses.fields(cls) if one.init}
    assert shown(entrypoint).keys() - OWN == taken - OWN


def test_the_first_are_given_in_order_and_the_rest_by_name(
    entrypoint: Callable[..., Any],
) -> None:
    _, in_order = CASES[entrypoint]
    kinds = [one.kind for one in shown(entrypoint).values()]
    by_name = len(kinds) - len(in_order)
    assert list(shown(entrypoint))[: len(in_order)] == in_order
    assert kinds[: len(in_order)] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(in_order)
    assert kinds[len(in_order) :] == [inspect.Parameter.KEYWORD_ONLY] * by_name


def test_shown_defaults_are_those_of_a_call_without_arguments() -> None:
    without = {*OWN, "model"}
    given = {name: one.default for name, one in shown(oneshot).items() if name not in without}
    made = parse_arguments({"model": "m", **given}, *COMMON)
    assert made == parse_arguments({"model": "m"}, *COMMON)


def test_help_shows_arguments_with_their_types_and_defaults() -> None:
    text = pydoc.plain(pydoc.render_doc(oneshot))
    assert "num_calibration_samples: int | None = 512" in text
    assert "data_collator: str | collections.abc.Callable" in text
    assert "Compress a trained model in one run" in text
    assert "Text" not in text


@pytest.mark.parametrize("name", ["oneshot", "train"])
def test_a_function_is_not_hidden_by_its_module(name: str) -> None:
    module = importlib.import_module(f"llmcompressor.entrypoints.{name}")
    setattr(entrypoints, name, module)  # as Python does when it imports the module
    assert getattr(entrypoints, name) is getattr(llmcompressor, name)
    assert isinstance(entrypoints.run, ModuleType)
    assert sorted(entrypoints.__all__) == ["Oneshot", "model_free_ptq", "oneshot", "train"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: llmcompressor.oneshot("model", recipie=[]),
        lambda: llmcompressor.train("model", recipie=[]),
        lambda: llmcompressor.plan("model", recipie=[]),
        lambda: llmcompressor.run_stages(
            "model", "pruning_modifiers: {WandaPruningModifier: {sparsity: 0.5}}", recipie=[]
        ),
        lambda: llmcompressor.evaluate("model", referense="model"),
        lambda: llmcompressor.verify("model", referense="model"),
        lambda: llmcompressor.model_free_ptq("model", "out", "W8A8", maxworkers=3),
    ],
    ids=ENTRYPOINTS,
)
def test_a_misspelt_argument_is_told_with_a_suggestion(call: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError, match=r"Did you mean (recipe|reference|max_workers)"):
        call()


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_a_missing_argument_is_told(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}\(\) does not take .* missing a required"):
        getattr(llmcompressor, name)()


def test_names_of_blocks_that_earlier_releases_had() -> None:
    assert canonical.Canonical is canonical.CanonicalTensor
    assert batches.calibrating is batches.calibration_batches
