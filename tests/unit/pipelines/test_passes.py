# SPDX-License-Identifier: Apache-2.0
"""Who shares a pass with what learns before it, and which pipeline runs."""

from __future__ import annotations

from typing import Any

import pytest

from llmcompressor.core import State
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform import SpinQuantModifier
from llmcompressor.pipelines.passes import split_at_rewrites, split_into_passes


class Scaling(Modifier):
    """Changes weights without data."""

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        return True


def learning() -> SpinQuantModifier:
    return SpinQuantModifier(learnable=True)


def rounding() -> QuantizationModifier:
    return QuantizationModifier(targets="Linear", scheme="W4A16")


def solving() -> GPTQModifier:
    return GPTQModifier(targets="Linear", scheme="W4A16")


def names(passes: list[list[Modifier]]) -> list[list[str]]:
    return [[type(one).__name__.removesuffix("Modifier") for one in each] for each in passes]


@pytest.mark.parametrize("pipeline", ["independent", "sequential"])
def test_what_learns_first_begins_a_pass_without_collectors(pipeline: str) -> None:
    recipe = [Scaling(), learning(), rounding()]
    assert names(split_into_passes(recipe, pipeline)) == [
        ["Scaling"],
        ["SpinQuant", "Quantization"],
    ]
    recipe = [SmoothQuantModifier(), learning(), solving()]
    assert names(split_into_passes(recipe, pipeline)) == [["SmoothQuant"], ["SpinQuant"], ["GPTQ"]]


def test_in_memory_too_it_finds_what_stands_before_done() -> None:
    recipe = [Scaling(), learning(), rounding(), solving()]
    stretches = [["Scaling"], ["SpinQuant"], ["Quantization", "GPTQ"]]
    assert names(split_at_rewrites(recipe)) == stretches
