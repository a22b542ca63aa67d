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

COMMON = (ModelArguments, RecipeArguments, DatasetArguments, RunArguments)
CASES: dict[Callable[..., Any], tuple[tuple[type, ...], list[str]]] = {
    oneshot: (COMMON, ["model", "recipe", "dataset", "output_dir", "log_dir"]),
    Oneshot: (COMMON, ["output_dir", "log_dir"]),
    train: (
        (*COMMON, TrainingArguments),
        ["model", "recipe", "dataset", "output_dir"],
    ),
}
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
    with pytest.raises(TypeError, match="model"):
        oneshot()  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["oneshot", "train"])
def test_a_function_is_not_hidden_by_its_module(name: str) -> None:
    module = importlib.import_module(f"llmcompressor.entrypoints.{name}")
    setattr(entrypoints, name, module)  # as Python does when it imports the module
    assert getattr(entrypoints, name) is getattr(llmcompressor, name)
    assert isinstance(entrypoints.run, ModuleType)
    assert sorted(entrypoints.__all__) == ["Oneshot", "model_free_ptq", "oneshot", "train"]
