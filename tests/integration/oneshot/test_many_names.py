# SPDX-License-Identifier: Apache-2.0
"""Recipes that name every module: twice as many names take twice as long, not four times."""

from __future__ import annotations

import cProfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.thinned import few
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from llmcompressor import oneshot, plan
from llmcompressor.modifiers.awq import AWQMapping
from llmcompressor.modifiers.pruning import WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import AWQModifier

MATCHING = (
    "llmcompressor/names.py",
    "llmcompressor/modeling/matching.py",
    "llmcompressor/modeling/mapped_places.py",
    "llmcompressor/modeling/named_mappings.py",
    "llmcompressor/schemes/assign.py",
    "llmcompressor/planning/matching.py",
    "llmcompressor/checkpoint/quantization_config.py",
    "llmcompressor/modifiers/sparsity/targets.py",
    "compressed_tensors/utils/match.py",
)


def _folder(experts: int, folder: Path) -> Path:
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        num_experts=experts,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _experts(count: int) -> list[str]:
    own = ("gate_proj", "up_proj", "down_proj")
    return [f"model.layers.0.mlp.experts.{e}.{each}" for e in range(count) for each in own]


def _named(count: int) -> Any:
    weights = {"num_bits": 8, "strategy": "channel"}
    groups = {
        "experts": {"targets": _experts(count), "weights": weights},
        "rest": {"targets": ["re:.*self_attn.*"], "weights": {**weights, "num_bits": 4}},
    }
    return QuantizationModifier(config_groups=groups)


def _left_out(count: int) -> Any:
    return QuantizationModifier(
        targets=["Linear"], scheme="W8A8", ignore=["lm_head", *_experts(count)]
    )


def _narrow(_: int) -> Any:
    """Rows of 32 columns are no group of 128: each module gets a scheme with its name."""
    return QuantizationModifier(targets=["Linear"], scheme="W8A16", ignore=["lm_head"])


def _pruned(count: int) -> Any:
    return WandaPruningModifier(targets=_experts(count), sparsity=0.5, mask_structure="2:4")


def _scaled(count: int) -> Any:
    of = "model.layers.0.mlp.experts"
    mappings = [AWQMapping(f"{of}.{e}.up_proj", [f"{of}.{e}.down_proj"]) for e in range(count)]
    return [AWQModifier(mappings=mappings, duo_scaling=False, n_grid=2), _narrow(count)]


RECIPES = [_named, _left_out, _narrow, _pruned, _scaled]


def _calls(work: Any) -> int:
    """How many calls of the functions that match names ``work`` takes."""
    with cProfile.Profile(builtins=False) as profile:
        work()
    return sum(
        one.callcount
        for one in profile.getstats()
        if not isinstance(one.code, str) and one.code.co_filename.endswith(MATCHING)
    )


@pytest.mark.parametrize("recipe", few(RECIPES, _named, _scaled))
def test_twice_as_many_modules_take_twice_as_many_comparisons(recipe: Any, tmp_path: Path) -> None:
    data = [{"input_ids": list(range(1, 17))}] if recipe in (_pruned, _scaled) else None
    made, planned = {}, {}
    for experts in (8, 16):
        folder = str(_folder(experts, tmp_path / f"model-{experts}"))
        output = str(tmp_path / f"out-{experts}")

        def run(folder: str = folder, output: str = output, experts: int = experts) -> None:
            oneshot(model=folder, recipe=recipe(experts), dataset=data, output_dir=output)

        def foresee(folder: str = folder, experts: int = experts) -> None:
            plan(model=folder, recipe=recipe(experts), dataset=data, measure=False)

        planned[experts] = _calls(foresee)
        made[experts] = _calls(run)
    assert made[16] < 1.85 * made[8]  # 1.4 to 1.65, as a part does not depend on their number
    assert planned[16] < 1.85 * planned[8]
