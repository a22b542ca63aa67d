# SPDX-License-Identifier: Apache-2.0
"""Weights that are one zero: what is computed with them, and without writing them out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Linear
from transformers import AutoConfig, AutoModelForCausalLM

from llmcompressor.modeling.meta_weights import skip_zero_products, zero_weights


@pytest.mark.parametrize("bias", [True, False])
def test_products_with_one_zero_are_those_of_torch(bias: bool) -> None:
    with torch.device("meta"):
        linear = Linear(8, 4, bias=bias)
    given = torch.randn(2, 3, 8)
    with torch.no_grad(), zero_weights(linear):
        expected = linear(given)
        with skip_zero_products():
            assert torch.equal(linear(given), expected)


def test_no_weight_is_written_out() -> None:
    with torch.device("meta"):
        linear = Linear(2**20, 2**20)  # four terabytes
    with torch.no_grad(), zero_weights(linear), skip_zero_products():
        assert not linear(torch.ones(1, 2**20)).any()


@pytest.mark.parametrize("is_bias", [False, True])
def test_experts_that_are_skipped_return_what_they_would(is_bias: bool) -> None:
    config = AutoConfig.for_model(
        "gpt_oss" if is_bias else "qwen3_moe",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        moe_intermediate_size=32,
        vocab_size=32,
        pad_token_id=0,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (experts,) = [one for one in model.modules() if type(one).__name__.endswith("Experts")]
    stacks = list(experts.parameters())
    given, chosen = torch.randn(6, 32), torch.tensor([[0, 1], [2, 3]] * 3)
    with torch.no_grad(), zero_weights(model):
        expected = experts(given, chosen, torch.rand(6, 2))
    with torch.no_grad(), zero_weights(model, skips_experts=True):
        assert torch.equal(experts(given, chosen, torch.rand(6, 2)), expected)
        assert all(not any(one.stride()) for one in experts.parameters())  # no memory
    assert all(a is b for a, b in zip(stacks, experts.parameters(), strict=True))
