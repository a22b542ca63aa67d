# SPDX-License-Identifier: Apache-2.0
"""What a report tells of modules is found in files that call them something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import tiny_mixtures as tiny
from transformers import AutoModelForCausalLM, GraniteMoeConfig, LagunaConfig, NemotronHConfig

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.pruning import REAPPruningModifier, WandaPruningModifier
from llmcompressor.verification import Severity

_EXPERTS = {"head_dim": 8, "moe_intermediate_size": 32}
CONFIGS: dict[str, Any] = {
    # the whole model under another prefix
    "nemotron_h": NemotronHConfig(
        **tiny.COMMON,
        **_EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        layers_block_type=["attention", "moe"],
    ),
    # a part of it
    "laguna": LagunaConfig(**tiny.COMMON, **_EXPERTS, num_experts=4),
    # experts in two Linears
    "granitemoe": GraniteMoeConfig(**tiny.COMMON, num_local_experts=4),
}
RECIPES = {
    "pruned": WandaPruningModifier(sparsity=0.5, ignore=["lm_head"]),
    "dropped": REAPPruningModifier(sparsity=0.5),
}


def made(family: str, recipe: str, folder: Path) -> tuple[Path, Path]:
    """A model's folder, and that of what a recipe makes of it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).bfloat16()
    model.save_pretrained(folder / "source")
    oneshot(
        model=str(folder / "source"),
        recipe=RECIPES[recipe].model_copy(deep=True),
        dataset=[{"input_ids": torch.randint(3, 90, (16,)).tolist()} for _ in range(8)],
        output_dir=str(folder / "out"),
        num_calibration_samples=8,
    )
    return folder / "source", folder / "out"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_recorded_is_no_fault(family: str, recipe: str, tmp_path: Path) -> None:
    source, output = made(family, recipe, tmp_path)
    told = json.loads((output / "compression_report.json").read_text())
    names = told.get("stored_as", {})
    # Laguna's files call its experts what the model does
    assert bool(names) == ((family, recipe) != ("laguna", "dropped"))
    assert not any(".experts." in name for name in names), "all of them are one"
    faults = [
        one for one in verify(output, reference=source).findings if one.severity == Severity.ERROR
    ]
    assert not faults


def test_what_is_not_recorded_still_is(tmp_path: Path) -> None:
    source, output = made("nemotron_h", "pruned", tmp_path)
    (output / "manifest.json").unlink()  # it would tell of either
    file = output / "model.safetensors"
    tensors = load_file(file)
    changed = ["backbone.layers.0.mixer.q_proj.weight", "backbone.layers.1.mixer.gate.weight"]
    for name in changed:
        tensors[name][0] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    found = verify(output, reference=source).findings
    faults = [one for one in found if one.severity == Severity.ERROR]
    assert [(one.rule, one.module) for one in faults] == [("R4", changed[1])]
