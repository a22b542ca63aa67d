# SPDX-License-Identifier: Apache-2.0
"""What planning asks of each form of a module it does not ask of each module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.published_models import (
    DEEPSEEK_V3,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    small,
    tensors_of,
    write_headers,
)
from torch.nn import Linear, Module, ModuleDict, ModuleList
from transformers import core_model_loading

from llmcompressor.args import ModelArguments
from llmcompressor.core.state import State
from llmcompressor.errors import CheckpointError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.planning.matching import match_patterns
from llmcompressor.planning.subject import PlannedModel, open_planned_model
from llmcompressor.quantization import base
from llmcompressor.schemes import assign, checks

STACKED = {"mixtral": MIXTRAL_8X7B, "qwen3_moe": QWEN3_30B_A3B, "deepseek_v3": DEEPSEEK_V3}
COUNTED = ("num_local_experts", "num_experts", "n_routed_experts")


def with_experts(config: dict[str, Any], count: int) -> dict[str, Any]:
    """A small configuration with so many experts."""
    found = small(config)
    return found | {key: count for key in COUNTED if key in found}


def opened(folder: Path, config: dict[str, Any], left_out: str = "nothing") -> PlannedModel:
    tensors = {name: shape for name, shape in tensors_of(config).items() if left_out not in name}
    return open_planned_model(ModelArguments(model=write_headers(folder, config, tensors)))


def counter(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[int]:
    """The calls of a function, as a list that grows."""
    function: Callable[..., Any] = getattr(place, name)
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    monkeypatch.setattr(place, name, counting)
    return calls


@pytest.mark.parametrize("kind", STACKED)
def test_experts_of_one_stack_are_loaded_as_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counter(monkeypatch, core_model_loading, "spawn_materialize")
    counts = []
    for experts in (4, 32):
        calls.clear()
        subject = opened(tmp_path / str(experts), with_experts(STACKED[kind], experts))
        counts.append(len(calls))
        stacks = [one for one in subject.model.parameters() if one.ndim == 3]
        assert stacks
        assert {one.shape[0] for one in stacks} == {experts}
        assert all(type(one) is torch.nn.Parameter and one.is_meta for one in stacks)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("kind", STACKED)
def test_a_missing_expert_is_an_error(kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"experts.* is \[3, .* has \[4, "):
        opened(tmp_path, with_experts(STACKED[kind], 4), left_out=".experts.2.")


def mixture(layers: int, experts: int) -> Module:
    """Modules of a model whose experts are modules of their own, fewer than ten of each."""

    def linears(*names: str) -> ModuleDict:
        return ModuleDict({name: Linear(256, 256, bias=False) for name in names})

    def layer() -> ModuleDict:
        inner = [linears("gate_proj", "up_proj", "down_proj") for _ in range(experts)]
        mlp = ModuleDict({"gate": Linear(256, experts), "experts": ModuleList(inner)})
        return ModuleDict({"self_attn": linears("q_proj", "k_proj", "v_proj"), "mlp": mlp})

    with torch.device("meta"):
        return ModuleDict({"layers": ModuleList([layer() for _ in range(layers)])})


@pytest.mark.parametrize("ignore", [[], ["re:.*self_attn.*", r"re:layers\.[0-9]+\.mlp\.gate$"]])
def test_what_is_asked_of_modules_grows_with_forms(
    ignore: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        counter(monkeypatch, assign, "matching_targets"),
        counter(monkeypatch, checks, "_serving_key"),
        counter(monkeypatch, base, "quantized_linear_tensors"),
    ]
    counts = []
    quantized = []
    for layers, experts in ((1, 1), (9, 8)):
        for calls in asked:
            calls.clear()
        model = mixture(layers, experts)
        modifier = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=ignore)
        state = State(model=model)
        modifier.initialize(state)
        modifier.on_all_initialized(state)
        planned = modifier.predict(state).modules
        match_patterns(model, [(modifier, [one.name for one in planned])])
        counts.append([len(calls) for calls in asked])
        quantized.append(len(planned))
    kept = 0 if ignore else 3
    assert quantized == [kept + 3, 9 * (kept + 3 * 8)]
    assert counts[0] == counts[1]
    assert all(counts[0])
