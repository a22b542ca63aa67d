# SPDX-License-Identifier: Apache-2.0
"""Rows that do not fill their words of 32 bits are no reason to refuse a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support import small_models as small
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.checkpoint.packing import patch_packed_zero_points
from llmcompressor.modifiers.quantization import QuantizationModifier


@pytest.mark.parametrize(("bits", "symmetric"), [(2, True), (3, False), (4, True), (5, True)])
def test_a_packed_channel_scheme_of_an_odd_width(
    bits: int, symmetric: bool, tmp_path: Path
) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    small.llama(hidden_size=76, intermediate_size=100, head_dim=16).save_pretrained(folder)
    weights = {"num_bits": bits, "symmetric": symmetric, "strategy": "channel"}
    recipe = QuantizationModifier(
        config_groups={"g": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"]
    )
    model = oneshot(folder, recipe=recipe, output_dir=str(out))
    with patch_packed_zero_points():
        read = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert torch.equal(small.logits(read), small.logits(model))
    assert not verify(out).errors
