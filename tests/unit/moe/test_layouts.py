# SPDX-License-Identifier: Apache-2.0
"""Stacks of experts taken apart: what is found, and that it computes what it computed."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support import mixtures
from tests.support.thinned import thinned
from torch import Tensor, nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    ErnieFuseAndSplitTextVisionExperts,
    MergeModulelist,
    WeightConverter,
)

from llmcompressor.checkpoint import names as expert_names
from llmcompressor.checkpoint.moe_names import unfuse_stored_experts
from llmcompressor.checkpoint.names import expert_linear_names, stacking_converters
from llmcompressor.errors import TargetError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.moe.expert_stops import begin_calibration_stages
from llmcompressor.moe.layouts import DOWN, GATE, UP
from llmcompressor.moe.linear_experts import (
    LinearExperts,
    find_stacked_moes,
    fuse_experts,
    unfuse_experts,
)
from llmcompressor.pipelines.moe_selection import targeted_moes

NAMES = {GATE: GATE, UP: UP, DOWN: DOWN}
SHOWN = ["routed", "all_tokens", "neighbours", "nothing"]
W = {GATE: "w1", UP: "w3", DOWN: "w2"}


@pytest.mark.parametrize("family", mixtures.FAMILIES)
def test_outputs_stay(family: str) -> None:
    """Measured: equal bit for bit in float32."""
    model = mixtures.build(family)
    before = mixtures.logits(model)
    opened = unfuse_stored_experts(model, find_stacked_moes(model))
    assert len(opened) == (1 if family == "deepseek_v3" else 2)
    assert torch.allclose(mixtures.logits(model), before, atol=1e-6)
    name, last = list(opened.items())[-1]
    whole = fuse_experts(last)
    for stack, wanted in mixtures.build(family).get_submodule(name).named_parameters():
        assert torch.equal(getattr(whole, stack), wanted)
    for expert in range(last.num_experts):
        last.linear(expert, DOWN).weight.data.mul_(2)
    assert not torch.allclose(mixtures.logits(model), before, atol=1e-3), "experts do not matter"


@pytest.mark.parametrize(
    ("family", "shown", "wave"), thinned(mixtures.FAMILIES, itertools.product(SHOWN, [None, 3]))
)
def test_what_is_shown_changes_no_output(family: str, shown: Any, wave: int | None) -> None:
    model = mixtures.build(family)
    before = mixtures.logits(model)
    opened = unfuse_stored_experts(model, find_stacked_moes(model))
    for mixture in opened.values():
        begin_calibration_stages(mixture, wave)
        mixture.shown = [shown] * mixture.num_experts
    assert torch.allclose(mixtures.logits(model), before, atol=1e-6)
    for mixture in opened.values():
        mixture.end()
        assert not [name for name in mixture._modules if "_" in name and name != "act_fn"]


def test_names_of_another_part_of_the_model_are_not_taken() -> None:
    model = mixtures.build("qwen3_moe")
    own = stacking_converters(model)
    tower = [
        WeightConverter(
            [f"mlp.experts.*.{name}.weight" for name in names],
            f"mlp.experts.{stack}",
            [MergeModulelist(dim=0), *([Concatenate(dim=1)] if len(names) > 1 else [])],
        )
        for stack, names in {"gate_up_proj": ("fc1", "fc3"), "down_proj": ("fc2",)}.items()
    ]
    for entry in tower:
        entry.scope_prefix, entry.base_model_prefix = "tower", "model"
    for mixture in find_stacked_moes(model):
        assert expert_linear_names(mixture, [*own, *tower]) == NAMES
        there = replace(mixture, name=mixture.name.replace("model.", "model.tower."))
        assert expert_linear_names(there, [*own, *tower]) == {GATE: "fc1", UP: "fc3", DOWN: "fc2"}


class Stacked(nn.Module):
    """No family's: experts whose rows go through tanh."""

    def __init__(self, experts: int = 3, hidden: int = 8, size: int = 5) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * size, hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, size))
        self.act_fn = nn.Tanh()

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(len(self.down_proj)):
            token, place = torch.where(index == expert)
            gate, up = (hidden_states[token] @ self.gate_up_proj[expert].T).chunk(2, -1)
            made = self.between(gate, up) @ self.down_proj[expert].T
            result.index_add_(0, token, made * weights[token, place, None])
        return result

    def between(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up


class Clamped(Stacked):
    def between(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up.clamp(max=0.5)


class Normed(Stacked):
    """Norms what an expert has made before it is weighted, and declares it as transformers does."""

    is_transposed, is_concatenated, has_gate, has_bias = False, True, True, False
    has_post_expert_norm = True

    def __init__(self) -> None:
        super().__init__(hidden=12)
        self.post_expert_norm = RMSNorm(12)

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(len(self.down_proj)):
            token, place = torch.where(index == expert)
            gate, up = (hidden_states[token] @ self.gate_up_proj[expert].T).chunk(2, -1)
            made = self.post_expert_norm(self.between(gate, up) @ self.down_proj[expert].T)
            result.index_add_(0, token, made * weights[token, place, None])
        return result


class SaysNoNorm(Normed):
    has_post_expert_norm = False


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * hidden_states * scale


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 8))


def holding(module: nn.Module, name: str = "experts") -> nn.Module:
    model = nn.Module()
    model.add_module(name, module)
    model.config = SimpleNamespace(num_experts=3)
    return model


class Matrices(nn.Module):
    """Parameters that no Linear is made of, and a router's among them."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def test_experts_that_cannot_be_unfused_have_a_problem() -> None:
    joined = Matrices(w1=(24, 4), w2=(24, 4), scale=(4,))
    for module, name, problem in (
        (Clamped(), "experts", "something else"),
        (SaysNoNorm(), "experts", "something else"),
        (Odd(), "experts", "its stacks are w"),
        (Odd(), "mlp", "its stacks are w"),
        (joined, "experts", "w1 and w2 of Matrices are neither Linears nor stacks"),
    ):
        (found,) = find_stacked_moes(holding(module, name))
        assert found.form is None
        assert problem in found.problem


def recorded(mixture: LinearExperts) -> dict[tuple[int, str], list[Tensor]]:
    """What each Linear was called with, filled while it is watched."""
    seen: dict[tuple[int, str], list[Tensor]] = {}
    for expert in range(mixture.num_experts):
        for role in (GATE, UP, DOWN):
            calls = seen.setdefault((expert, role), [])
            mixture.linear(expert, role).register_forward_pre_hook(
                lambda _, args, calls=calls: calls.append(args[0])
            )
    return seen


@pytest.fixture
def small() -> tuple[LinearExperts, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    (found,) = find_stacked_moes(holding(Stacked()))
    index = torch.tensor([[0, 1], [0, 1], [1, 0], [1, 2]])
    return unfuse_experts(found, NAMES), torch.randn(4, 8), index, torch.rand(4, 2)


@torch.no_grad()
def test_every_linear_is_shown_its_input_once(small: Any) -> None:
    mixture, *given = small
    tokens = given[0]
    wanted = {
        "routed": [[0, 1, 2], [0, 1, 2, 3], [3]],
        "all_tokens": [[0, 1, 2, 3]] * 3,
        # the second would get as many rows as there are tokens
        "neighbours": [[0, 1, 2, 3, 3], [0, 1, 2], [0, 1, 2, 0, 1, 2, 3]],
        "nothing": [None] * 3,
    }
    seen = recorded(mixture)
    for shown, each in wanted.items():
        begin_calibration_stages(mixture)
        mixture.shown = [shown] * 3
        mixture(*given)
        for expert, rows in enumerate(each):
            for role in (GATE, UP, DOWN):
                calls = seen[expert, role]
                assert [len(one) for one in calls] == ([] if rows is None else [len(rows)])
            if rows is not None:
                assert torch.equal(seen[expert, GATE][0], tokens[rows])
                assert seen[expert, GATE][0] is seen[expert, UP][0], "one statistic for both"
        if shown == "routed":
            between = mixture.between(1, tokens)
            assert torch.allclose(seen[1, DOWN][0], between)
        for calls in seen.values():
            calls.clear()
        mixture.end()


@torch.no_grad()
def test_padding_is_neither_counted_nor_shown(small: Any) -> None:
    mixture, *given = small
    before = mixture(*given)
    assert mixture.counts(*given) == [3, 4, 1]
    seen = recorded(mixture)
    begin_calibration_stages(mixture)
    mixture.real_T = torch.tensor([False, True, True, True])
    assert mixture.counts(*given) == [2, 3, 1]
    assert torch.allclose(mixture(*given), before, atol=1e-6)
    assert [len(seen[expert, DOWN][0]) for expert in range(3)] == [2, 3, 1]
    assert [len(seen[expert, GATE][0]) for expert in range(3)] == [2, 3, 1]


@pytest.mark.parametrize(
    "operations", [[ErnieFuseAndSplitTextVisionExperts()], [MergeModulelist(dim=0)]]
)
def test_experts_with_other_numbers_in_a_checkpoint_are_refused(
    operations: list[ConversionOps], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixtures.build("mixtral")
    table = [WeightConverter(["experts.*.down_proj.weight"], "experts.down_proj", operations)]
    monkeypatch.setattr(expert_names, "get_model_conversion_mapping", lambda *_, **__: table)
    recipe = [QuantizationModifier(targets="Linear", scheme="W8A8")]
    if operations[0].__class__ is MergeModulelist:
        assert len(targeted_moes(model, recipe)) == 2
        return
    with pytest.raises(TargetError, match=r"layers\.0\.mlp\.experts.* other numbers") as caught:
        targeted_moes(model, recipe)
    ignore = re.findall(r"ignore=\['(.*)'\]", str(caught.value))
    assert not targeted_moes(
        model, [QuantizationModifier(targets="Linear", scheme="W8A8", ignore=ignore)]
    )
