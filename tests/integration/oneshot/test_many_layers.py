# SPDX-License-Identifier: Apache-2.0
"""Models with many layers: no function is called more often for each layer than in a small one."""

from __future__ import annotations

import cProfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from llmcompressor import oneshot, plan, verify
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.sparsity import SparseGPTModifier
from llmcompressor.modifiers.transform import AWQModifier, SpinQuantModifier

LOOKED_AT = ("llmcompressor/", "dataclasses.py", "nn/modules/module.py", "pydantic/main.py")
FEW, TIMES, MOST = 2, 4, 5.5
RECIPES: dict[str, Callable[[], list[Any]]] = {
    "rounded": lambda: [QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])],
    "solved": lambda: [
        SmoothQuantModifier(),
        GPTQModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"]),
    ],
    "scaled": lambda: [
        AWQModifier(clip=True),
        QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"]),
    ],
    "pruned": lambda: [SparseGPTModifier(sparsity=0.5, ignore=["lm_head"])],
    "dropped": lambda: [
        REAPPruningModifier(sparsity=0.5),
        GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
    ],
    "rotated, in two passes": lambda: [
        SpinQuantModifier(rotations=["R1", "R2"]),
        GPTQModifier(targets=["re:.*mlp.*"], scheme="W8A16"),
        QuantizationModifier(targets=["re:.*self_attn.*"], scheme="FP8"),
    ],
}


QUICK = {"scaled", "pruned"}


def _folder(recipe: str, layers: int, folder: Path) -> str:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
    }
    config: Any = LlamaConfig(**sizes)
    if recipe == "dropped":
        experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        config = Qwen3MoeConfig(**sizes, **experts, head_dim=16)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def _calls(work: Callable[[], object]) -> Counter[str]:
    """How often ``work`` calls what, in this thread."""
    profile = cProfile.Profile()
    profile.runcall(work)
    counted: Counter[str] = Counter()
    for entry in profile.getstats():
        if any(part in str(entry.code) for part in LOOKED_AT):  # else one of many that others call
            counted[str(entry.code)] += entry.callcount
    return counted


def _calls_of_all(recipe: str, layers: int, folder: Path) -> Counter[str]:
    """Those of a plan, of a run over a folder and one in memory, and of verify."""
    data = None if recipe == "rounded" else [{"input_ids": list(range(1, 17))}] * 2
    source, output = _folder(recipe, layers, folder / "model"), folder / "output"
    make, model = RECIPES[recipe], AutoModelForCausalLM.from_pretrained(source)
    found = _calls(lambda: plan(source, make(), data, measure=False))
    found += _calls(lambda: oneshot(source, make(), data, output_dir=output))
    found += _calls(lambda: verify(output, source))
    return found + _calls(lambda: oneshot(model, make(), data))


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in RECIPES],
)
def test_four_times_as_many_layers_take_four_times_as_many_calls(
    recipe: str, tmp_path: Path
) -> None:
    few = _calls_of_all(recipe, FEW, tmp_path / "few")
    many = _calls_of_all(recipe, TIMES * FEW, tmp_path / "many")
    grown = {what: (few[what], count) for what, count in many.items() if count > 400}
    assert not {what: was for what, was in grown.items() if was[1] > MOST * was[0]}
