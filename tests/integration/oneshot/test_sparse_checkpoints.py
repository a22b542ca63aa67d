# SPDX-License-Identifier: Apache-2.0
"""Pruned checkpoints: dense tensors, the same streamed as in memory, read by transformers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.small_models import llama, logits, token_rows, tree
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

pytestmark = pytest.mark.slow

PAIRS: dict[str, Any] = {"sparsity": 0.5, "mask_structure": "2:4", "ignore": ["lm_head"]}
OWL: dict[str, Any] = {
    "sparsity": 0.5,
    "sparsity_profile": "owl",
    "owl_m": 3,
    "owl_lmbda": 0.1,
    "targets": "LlamaDecoderLayer",
}
RECIPES: dict[str, Callable[[], list[Any]]] = {
    "sparsegpt": lambda: [SparseGPTModifier(**PAIRS)],
    "wanda": lambda: [WandaPruningModifier(**PAIRS)],
    "profile": lambda: [SparseGPTModifier(**OWL)],
    "then rounded": lambda: [
        SparseGPTModifier(**PAIRS),
        QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    ],
    "profile, then GPTQ": lambda: [
        WandaPruningModifier(**OWL),
        GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    ],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse") / "model"
    llama().save_pretrained(folder)
    return folder


def compressed(source: Path, recipe: str, target: Path, **arguments: Any) -> Any:
    return oneshot(
        model=arguments.pop("model", str(source)),
        recipe=RECIPES[recipe](),
        dataset=token_rows(),
        output_dir=str(target),
        **arguments,
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_checkpoint_is_served_without_us(recipe: str, source: Path, tmp_path: Path) -> None:
    model = compressed(source, recipe, tmp_path / "out")
    assert verify(str(tmp_path / "out")).ok
    found = logits(model)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    torch.testing.assert_close(logits(read), found)
    pruned = json.loads((tmp_path / "out" / "compression_report.json").read_text())["modifiers"]
    records = next(each for name, each in pruned.items() if name.startswith(("Sparse", "Wanda")))
    assert len(records) == 14
    if "the" not in recipe:
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert "quantization_config" not in config
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert {one.dtype for one in tensors.values()} == {torch.bfloat16}
        for name, record in records.items():
            weight = tensors[f"{name}.weight"]
            assert int((weight == 0).sum()) / weight.numel() == record["sparsity"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_the_same_streamed_as_in_memory(recipe: str, source: Path, tmp_path: Path) -> None:
    compressed(source, recipe, tmp_path / "streamed")
    whole = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    compressed(source, recipe, tmp_path / "whole", model=whole)
    streamed, in_memory = tree(tmp_path / "streamed"), tree(tmp_path / "whole")
    assert streamed["model.safetensors"] == in_memory["model.safetensors"]
    assert streamed["compression_report.json"] == in_memory["compression_report.json"]
