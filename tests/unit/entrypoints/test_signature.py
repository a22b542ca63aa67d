# SPDX-License-Identifier: Apache-2.0
"""What entrypoints show of their arguments: all that they take, as they take it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pydoc
from collections.abc import Callable
from dataclasses import dataclass, field
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
from llmcompressor.args.checks import Named, Text
from llmcompressor.entrypoints.oneshot import with_dataclass_signature

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


def test_the_first_ones_may_be_given_in_order_and_the_rest_by_name(
    entrypoint: Callable[..., Any],
) -> None:
    _, in_order = CASES[entrypoint]
    kinds = [one.kind for one in shown(entrypoint).values()]
    by_name = len(kinds) - len(in_order)
    assert list(shown(entrypoint))[: len(in_order)] == in_order
    assert kinds[: len(in_order)] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(in_order)
    assert kinds[len(in_order) :] == [inspect.Parameter.KEYWORD_ONLY] * by_name


def test_the_defaults_that_are_shown_are_those_of_a_call_without_arguments() -> None:
    without = {*OWN, "model"}
    given = {name: one.default for name, one in shown(oneshot).items() if name not in without}
    made = parse_arguments({"model": "m", **given}, *COMMON)
    assert made == parse_arguments({"model": "m"}, *COMMON)


def test_a_script_that_keeps_what_is_accepted_drops_nothing() -> None:
    arguments = {
        "model": "m",
        "num_calibration_samples": 8,
        "max_seq_length": 64,
        "pipeline": "sequential",
        "tokenizer": "t",
    }
    accepted = set(inspect.signature(oneshot).parameters)
    assert {name for name in arguments if name in accepted} == set(arguments)
    inspect.signature(oneshot).bind(**arguments, oneshot_device="cpu")


def test_help_shows_arguments_with_their_types_and_defaults() -> None:
    text = pydoc.plain(pydoc.render_doc(oneshot))
    assert "num_calibration_samples: int | None = 512" in text
    assert "data_collator: str | collections.abc.Callable" in text
    assert "Compress a trained model in one run" in text
    assert "Text" not in text
    with pytest.raises(TypeError, match="model"):
        oneshot()  # type: ignore[call-arg]


def test_a_field_of_several_classes_is_that_of_the_first_and_hidden_ones_are_left_out() -> None:
    @dataclass
    class First:
        seed: int = 1
        many: list[int] = field(default_factory=lambda: [3])

    @dataclass
    class Second:
        needed: Named
        seed: int = 2
        made: int = field(default=4, init=False)

    @with_dataclass_signature(First, Second)
    def function(many: int, *, own: str = "a", **rest: Any) -> int:
        return many + len(rest)

    # what it shows is what is bound; a call goes on as before
    found = inspect.signature(function)
    assert list(found.parameters) == ["many", "own", "seed", "needed", "rest"]
    assert found.parameters["seed"].default == 1
    assert found.parameters["needed"].default is inspect.Parameter.empty
    assert (found.parameters["many"].annotation, found.return_annotation) == (int, int)
    assert function(1, seed=5, other=6) == 3


def test_types_are_shown_without_what_a_command_line_needs() -> None:
    @dataclass
    class Some:
        one: Text | str | list[str] | None = None

    @with_dataclass_signature(Some)
    def function(**rest: Any) -> None: ...

    assert inspect.signature(function).parameters["one"].annotation == str | list[str] | None


@pytest.mark.parametrize("name", ["oneshot", "train"])
def test_a_function_is_not_hidden_by_its_module(name: str) -> None:
    module = importlib.import_module(f"llmcompressor.entrypoints.{name}")
    setattr(entrypoints, name, module)  # as Python does when it imports the module
    assert getattr(entrypoints, name) is getattr(llmcompressor, name)
    assert isinstance(entrypoints.run, ModuleType)
    assert sorted(entrypoints.__all__) == ["Oneshot", "model_free_ptq", "oneshot", "train"]
