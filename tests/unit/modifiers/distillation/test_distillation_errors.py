# SPDX-License-Identifier: Apache-2.0
"""What distillation refuses, and that it says so before the first step where it can."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny
from torch import Tensor, nn

from llmcompressor.args import ModelArguments
from llmcompressor.core import CompressionSession, callbacks, create_session
from llmcompressor.errors import InputError, RecipeError
from llmcompressor.modifiers.distillation import OutputDistillationModifier
from llmcompressor.training import SessionManagerMixIn

LAYERS = r"re:.*layers\.\d+$"


@pytest.fixture
def session() -> Iterator[CompressionSession]:
    with create_session() as opened:
        yield opened
        opened.reset()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"comparison": "kl_divergance"}, ["kl_divergance", "Did you mean kl_divergence"]),
        ({"transforms": ["softmax", "soft"]}, ["transform", "'soft'", "softmax"]),
        ({"comparison_args": {"temprature": 2}}, ["kl_divergence", "temprature", "temperature"]),
        ({"comparison_args": {"temperature": 0}}, ["temperature", "0", "above 0"]),
        ({"comparison_args": {"temperature": "2"}}, ["temperature", "'2'"]),
        ({"comparison": "square_head", "comparison_args": {"mean_square": 1}}, ["per_token"]),
        ({"transforms": "identity", "transforms_args": {"p": 2}}, ["identity", "none"]),
        ({"transforms": ["softmax"], "transforms_args": [{}, {}]}, ["2 entries for 1"]),
        ({"temperature": -1.0}, ["temperature", "greater than 0"]),
        ({"temperature": float("inf")}, ["temperature", "finite"]),
        ({"temperature": 2.0, "comparison": "l2_distance"}, ["l2_distance", "no temperature"]),
        ({"temperature": 2.0, "comparison_args": {"temperature": 3.0}}, ["two temperatures"]),
        ({"projection": "mean"}, ["projection", "'mean'", "linear"]),
        ({"projection_args": {"seed": 1}}, ["projection_args", "seed"]),
        ({"projection": "linear", "projection_args": {"seed": "x"}}, ["seed", "integer"]),
        ({"targets": []}, ["targets", "none"]),
        ({"targets": [["a", "b", "c"]]}, ["targets"]),
        ({"orig_scale": -0.5}, ["orig_scale"]),
        ({"update": 1}, ["update", "every batch"]),
        ({"start": 3, "end": 2}, ["end (2)", "start (3)"]),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        OutputDistillationModifier(**fields)
    for word in ["OutputDistillationModifier", *words]:
        assert word in str(error.value)


def refusal(session: CompressionSession, student: Any, teacher: Any, **fields: Any) -> str:
    """What is said when the session begins; no trace is left on the models."""
    with pytest.raises(InputError) as error:
        session.initialize(
            recipe=[OutputDistillationModifier(**fields)], model=student, teacher_model=teacher
        )
    session.reset()
    assert tiny.traces(student) == {}
    return str(error.value)


def test_no_teacher(session: CompressionSession) -> None:
    told = refusal(session, tiny.llama(), None)
    assert "no teacher" in told
    named = set(re.findall(r"(\w+)=\.\.\.", told))
    assert named == {"distill_teacher", "teacher", "teacher_model"}
    assert "train distill_teacher=" in told
    assert "distill_teacher" in {field.name for field in dataclasses.fields(ModelArguments)}
    assert "SessionManagerMixIn teacher=" in told
    assert "teacher" in inspect.signature(SessionManagerMixIn).parameters
    assert "teacher_model" in inspect.signature(CompressionSession.initialize).parameters


def test_a_teacher_that_is_none(session: CompressionSession) -> None:
    assert "a str and not a model" in refusal(session, tiny.llama(), "name/of-a-model")
    student = tiny.llama()
    assert "deepcopy" in refusal(session, student, student)


def test_layers_that_do_not_pair(session: CompressionSession) -> None:
    told = refusal(session, tiny.llama(), tiny.llama(num_hidden_layers=5), targets=LAYERS)
    assert "2 modules (model.layers.0 … model.layers.1) of the student" in told
    assert "5 modules (model.layers.0 … model.layers.4) of the teacher" in told
    assert "pair [student, teacher]" in told


def test_a_target_that_matches_nothing(session: CompressionSession) -> None:
    told = refusal(session, tiny.llama(), tiny.llama(), targets=[["lm_head", "re:.*lm_haed$"]])
    assert "of the teacher (LlamaForCausalLM)" in told
    assert "Did you mean" in told
    told = refusal(session, tiny.llama(), tiny.llama(), targets="LlamaDecodrLayer")
    assert "of the student" in told
    assert "LlamaDecoderLayer" in told


def test_another_vocabulary(session: CompressionSession) -> None:
    told = refusal(session, tiny.llama(), tiny.llama(vocab_size=128))
    assert "vocabulary of 96 (lm_head)" in told
    assert "128" in told
    assert "tokenizer" in told


@pytest.mark.parametrize("target", [LAYERS, "re:.*mlp.down_proj$", "model.embed_tokens"])
def test_other_widths(session: CompressionSession, target: str) -> None:
    told = refusal(
        session, tiny.llama(), tiny.llama(hidden_size=96), targets=target, comparison="square_head"
    )
    assert "64 features" in told
    assert "96" in told
    assert "projection: linear" in told


@pytest.mark.parametrize(("strategy", "name"), [("fsdp", "FSDP"), ("zero3", "ZeRO stage 3")])
def test_a_projection_of_split_parameters(
    strategy: str, name: str, session: CompressionSession
) -> None:
    modifier = OutputDistillationModifier(targets=LAYERS, projection="linear")
    with pytest.raises(InputError, match=f"{name}, which splits"):
        session.initialize(
            recipe=[modifier],
            model=tiny.llama(),
            teacher_model=tiny.llama(),
            distributed_strategy=strategy,
        )


def test_models_without_a_head(session: CompressionSession) -> None:
    told = refusal(session, tiny.llama().model, tiny.llama())
    assert "student (LlamaModel)" in told
    assert "targets" in told


class Layered(nn.Module):
    """A model without a configuration, as simple as can be."""

    def __init__(self, width: int = 4, in_place: bool = False) -> None:
        super().__init__()
        self.first = Doubled(width)
        self.unused = nn.Linear(width, width)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return hidden.mul_(2.0) if self.in_place else hidden * 2.0


class Doubled(nn.Module):
    """A width that nobody knows before it runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + 0.0


def told_by_a_batch(
    session: CompressionSession, student: nn.Module, teacher: nn.Module, target: str = "first"
) -> str:
    modifier = OutputDistillationModifier(targets=target, comparison="l2_distance")
    session.initialize(recipe=[modifier], model=student, teacher_model=teacher)
    inputs = torch.ones(2, 4)
    callbacks.batch_start(batch_data=inputs)
    loss = student(inputs).sum()
    with pytest.raises(InputError) as error:
        callbacks.loss_calculated(loss=loss)
    return str(error.value)


def test_widths_that_only_a_batch_shows(session: CompressionSession) -> None:
    told = told_by_a_batch(session, Layered(4), Layered(5))
    assert "first of the student gives [2, 4]" in told
    assert "[2, 5]" in told


def test_a_module_that_is_not_called(session: CompressionSession) -> None:
    told = told_by_a_batch(session, Layered(), Layered(), "unused")
    assert "unused of the student gave no tensor" in told


def test_outputs_that_are_changed_in_place(session: CompressionSession) -> None:
    told = told_by_a_batch(session, Layered(in_place=True), Layered())
    assert "first of the student is changed in place" in told


def test_a_batch_that_is_not_told(session: CompressionSession) -> None:
    student = tiny.llama()
    session.initialize(
        recipe=[OutputDistillationModifier()], model=student, teacher_model=tiny.llama()
    )
    callbacks.batch_start()
    loss = student(**tiny.batches(number=1)[0]).logits.sum()
    with pytest.raises(InputError, match="batch_data"):
        callbacks.loss_calculated(loss=loss)
