# SPDX-License-Identifier: Apache-2.0
"""Rows that do not fill their words of 32 bits are no reason to refuse a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.quantization import QuantizationModifier


@pytest.mark.parametrize(("bits", "symmetric"), [(2, True), (3, False), (4, True), (5, True)])
def test_a_packed_channel_scheme_of_an_odd_width(
    bits: int, symmetric: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=76,
        intermediate_size=100,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=16,
        vocab_size=128,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    weights = {"num_bits": bits, "symmetric": symmetric, "strategy": "channel"}
    recipe = QuantizationModifier(
        config_groups={"g": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"]
    )
    model = oneshot(tmp_path / "model", recipe=recipe, output_dir=str(tmp_path / "out"))
    ids_BT = torch.arange(24).view(2, 12)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        torch.testing.assert_close(read(ids_BT).logits, model(ids_BT).logits, rtol=0, atol=0)
    assert not verify(tmp_path / "out").errors
