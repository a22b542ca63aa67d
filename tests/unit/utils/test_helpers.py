# SPDX-License-Identifier: Apache-2.0
"""What scripts enter around forwards of their own, and what they ask of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.utils import (
    DisableQuantization,
    calibration_forward_context,
    eval_context,
    get_embeddings,
    targets_embeddings,
    untie_word_embeddings,
)
from llmcompressor.utils.pytorch.module import get_no_split_params

IDS = torch.arange(8).reshape(1, 8)


def tiny(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    given = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(**given, num_attention_heads=2, num_key_value_heads=1, **changes)
    )


def test_evaluation_ends_with_the_block_for_each_module() -> None:
    model = tiny().train()
    model.lm_head.eval()
    with eval_context(model):
        assert not any(one.training for one in model.modules())
    assert model.training
    assert not model.lm_head.training


def test_calibration_has_neither_gradients_nor_a_cache() -> None:
    model = tiny().train()
    with calibration_forward_context(model):
        found = model(IDS)
        assert not model.training
    assert found.past_key_values is None
    assert not found.logits.requires_grad
    assert model.training


def test_a_quantized_model_computes_without_rounding_inside() -> None:
    model = oneshot(model=tiny(), recipe=QuantizationModifier(scheme="FP8_DYNAMIC"))
    with torch.no_grad():
        rounded = model(IDS).logits
        with DisableQuantization(model):
            plain = model(IDS).logits
        assert not torch.equal(plain, rounded)
        assert torch.equal(model(IDS).logits, rounded)


def test_embeddings_are_found_and_untied() -> None:
    model = tiny(tie_word_embeddings=True)
    inputs, outputs = get_embeddings(model)
    assert inputs is model.model.embed_tokens
    assert outputs is model.lm_head
    assert inputs.weight is outputs.weight
    untie_word_embeddings(model)
    assert inputs.weight is not outputs.weight
    assert torch.equal(inputs.weight, outputs.weight)
    assert not model.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("target", "check", "found"),
    [
        ("lm_head", {}, True),
        ("lm_head", {"check_output": False}, False),
        ("model.embed_tokens", {}, True),
        ("model.embed_tokens", {"check_input": False}, False),
        ("model.norm", {}, False),
    ],
)
def test_targets_are_embeddings_or_not(target: str, check: dict[str, bool], found: bool) -> None:
    model = tiny()
    assert targets_embeddings(model, [(target, model.get_submodule(target))], **check) is found


def test_a_model_names_what_stays_whole() -> None:
    assert get_no_split_params(tiny()) == ["LlamaDecoderLayer"]
    assert get_no_split_params(torch.nn.Linear(2, 2)) == "__ALL__"
