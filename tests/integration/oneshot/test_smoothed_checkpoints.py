# SPDX-License-Identifier: Apache-2.0
"""Smoothed and quantized, from checkpoint to checkpoint: the same as in memory, and readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import small_models as small
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier

pytestmark = pytest.mark.slow

FIELDS: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}


def recipe(name: str) -> list[Any]:
    if name == "smoothquant, gptq":
        return [SmoothQuantModifier(), GPTQModifier(scheme="W8A8", **FIELDS)]
    if name == "smoothquant, rounding":
        return [SmoothQuantModifier(), QuantizationModifier(scheme="W8A8", **FIELDS)]
    if name == "awq, static activations":
        return [AWQModifier(scheme="FP8", n_grid=4, duo_scaling=False, **FIELDS)]
    loss = "output" if name == "awq by outputs" else "statistics"
    return [AWQModifier(scheme="W4A16_ASYM", n_grid=4, loss=loss, **FIELDS)]


NAMES = [
    "smoothquant, gptq",
    "smoothquant, rounding",
    "awq",
    "awq by outputs",
    "awq, static activations",
]


@pytest.mark.parametrize("name", NAMES)
def test_written_by_blocks_it_is_the_same_and_reads_back(
    name: str, llama_folder: Path, tmp_path: Path
) -> None:
    data: dict[str, Any] = {"dataset": small.token_rows(), "shuffle_calibration_samples": False}
    streamed = oneshot(
        model=str(llama_folder), recipe=recipe(name), output_dir=tmp_path / "streamed", **data
    )
    whole = AutoModelForCausalLM.from_pretrained(llama_folder)
    oneshot(model=whole, recipe=recipe(name), output_dir=tmp_path / "whole", **data)
    files = [load_file(tmp_path / run / "model.safetensors") for run in ("streamed", "whole")]
    assert files[0].keys() == files[1].keys()
    for key, tensor in files[0].items():
        assert torch.equal(tensor, files[1][key]), key
    assert verify(tmp_path / "streamed").ok
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "streamed").eval()
    assert torch.equal(small.logits(read), small.logits(streamed))
    before = load_file(llama_folder / "model.safetensors")
    norms = [key for key in before if "layernorm" in key]
    # a search may find that some Linears are better left alone
    assert any(not torch.equal(files[0][norm], before[norm]) for norm in norms)


def test_a_mapping_across_blocks_is_refused_if_streamed(llama_folder: Path, tmp_path: Path) -> None:
    mapping = [["re:.*layers.1.*[qkv]_proj$"], "re:.*layers.0.mlp.up_proj$"]
    with pytest.raises(ValueError, match="joins nothing: no block"):
        oneshot(
            model=str(llama_folder),
            recipe=[SmoothQuantModifier(mappings=[mapping])],
            dataset=small.token_rows(),
            output_dir=tmp_path / "out",
        )
