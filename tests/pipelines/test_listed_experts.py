# SPDX-License-Identifier: Apache-2.0
"""Experts that the model's own code calls get no more than their tokens, and that is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tiny_models as tiny
import torch
from recorders import Recorder, hooks_left, run_pipeline
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from llmcompressor.errors import DatasetError, TargetError
from llmcompressor.modifiers.quantization import QuantizationModifier

PIPELINES = ["basic", "sequential", "layer_sequential", "independent"]
EXPERTS = 3
LIST = "model.layers.1.mlp.experts"


def chosen_of(tokens: int, share: Sequence[int]) -> Tensor:
    """An expert for each token."""
    return torch.tensor(share).repeat(tokens // len(share) + 1)[:tokens]


class Listed(nn.Module):
    """A list of MLPs; of ten tokens the first gets seven, the second three, the last none."""

    share: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0, 1, 1, 1)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.experts = nn.ModuleList([LlamaMLP(config) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = chosen_of(len(rows), self.share)
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                output[chosen == number] = expert(rows[chosen == number])
        return output.view_as(x)


class Shown(Listed):
    """All of them get every token."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(expert(x) for expert in self.experts)


class Patient(Recorder):
    """Can do without tokens, as those that quantize weights can."""

    def accepts_unreached(self, name: str) -> bool:
        return True


def build(kind: type[Listed]) -> Any:
    model: Any = tiny.build("llama")
    model.model.layers[1].mlp = kind(model.config)
    return model.eval()


def told(warned: list[str]) -> list[str]:
    return [one for one in warned if "model's own code calls" in one]


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("twin", [False, True])
def test_that_they_are_not_shown_all_tokens_is_said_once(
    pipeline: str, twin: bool, warned: list[str]
) -> None:
    model, batches = build(Listed), tiny.text_batches()
    sizes = [batch["input_ids"].numel() for batch in batches]
    most = sum(int((chosen_of(size, Listed.share) == 0).sum()) for size in sizes)
    run_pipeline(model, batches, Patient(twin=twin, round_to=2), pipeline)
    (said,) = told(warned)
    assert LIST in said
    assert f"(0 to {most})" in said
    assert "moe_calibrate_all_experts=True has no effect" in said
    assert f"1 of {EXPERTS} experts: {LIST}.2 (0)." in said
    assert not hooks_left(model)


@pytest.mark.parametrize("policy", ["all_tokens", "rtn", "neighbours"])
def test_nor_has_a_policy_for_starved_ones_effect(policy: str, warned: list[str]) -> None:
    run_pipeline(
        build(Listed),
        tiny.text_batches(),
        Patient(),
        moe_calibrate_all_experts=False,
        starved_experts=policy,
    )
    (said,) = told(warned)
    assert f"starved_experts={policy!r} has no effect" in said


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_but_they_may_be_an_error(pipeline: str) -> None:
    model = build(Listed)
    with pytest.raises(DatasetError, match=rf"1 of {EXPERTS} experts: {LIST}\.2 \(0\)"):
        run_pipeline(model, tiny.text_batches(), Patient(), pipeline, starved_experts="error")
    assert not hooks_left(model)


def test_nothing_is_said_where_it_makes_no_difference(warned: list[str]) -> None:
    run_pipeline(build(Shown), tiny.text_batches(), Patient())
    enough = type("Enough", (Listed,), {"share": (0, 0, 0, 0, 1, 1, 1, 2, 2, 2)})
    run_pipeline(build(enough), tiny.text_batches(), Patient(), moe_calibrate_all_experts=False)
    run_pipeline(build(Listed), tiny.text_batches(), Patient(ignore=["lm_head", f"re:{LIST}.*"]))
    assert not told(warned)


def test_a_static_scale_without_tokens_needs_other_data() -> None:
    recipe = QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"])
    with pytest.raises(TargetError, match=rf"{LIST}\.2\..*own code calls.*Add data") as caught:
        run_pipeline(build(Listed), tiny.text_batches(), recipe)
    assert "Set moe_calibrate_all_experts" not in str(caught.value)
