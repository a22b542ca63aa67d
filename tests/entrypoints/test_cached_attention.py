# SPDX-License-Identifier: Apache-2.0
"""Quantized keys and values on attention that asks more of its cache, or has it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_models as small
import torch
from torch import Tensor
from transformers import (
    InklingForCausalLM,
    InklingTextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
)

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

SIZES: dict[str, Any] = {
    "vocab_size": small.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
PER_HEAD = {**FP8, "strategy": "attn_head"}
ATTENTION = {"group_0": {"targets": ["re:.*attn$"], "input_activations": FP8}}


def made(model_class: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config)
    return model.eval()


def llama4() -> PreTrainedModel:
    """Its second layer has no rotary embedding, and asks the cache how much it holds."""
    config = Llama4TextConfig(
        **SIZES, intermediate_size_mlp=64, moe_layers=[], no_rope_layers=[1, 0]
    )
    return made(Llama4ForCausalLM, config)


def inkling() -> PreTrainedModel:
    """It keeps the last states before its convolutions in the cache."""
    config = InklingTextConfig(
        **SIZES,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        d_rel=16,
        mlp_layer_types=["dense", "dense"],
    )
    return made(InklingForCausalLM, config)


def decoded(model: PreTrainedModel) -> Tensor:
    """The last logits, where the last token comes alone, beside what is cached."""
    tokens = small.probe()
    with torch.no_grad():
        state = model.eval()(tokens[:, :-1], use_cache=True)
        cache = state.past_key_values
        logits: Tensor = model(tokens[:, -1:], past_key_values=cache, use_cache=True).logits
    return logits


def run(model: PreTrainedModel, modifier: Any, folder: Path) -> PreTrainedModel:
    written: PreTrainedModel = oneshot(model, modifier, small.token_rows(), output_dir=folder)
    return written


@pytest.mark.parametrize("make", [llama4, inkling])
@pytest.mark.parametrize(
    "modifier",
    [
        lambda: QuantizationModifier(kv_cache_scheme=PER_HEAD),
        lambda: QuantizationModifier(config_groups=ATTENTION),
        lambda: GPTQModifier(
            targets="Linear", scheme="FP8", ignore=["lm_head"], kv_cache_scheme=FP8
        ),
    ],
    ids=["cache", "attention", "paused"],
)
def test_attention_that_asks_its_cache_is_calibrated_without_one(
    make: Callable[[], PreTrainedModel], modifier: Callable[[], Any], tmp_path: Path
) -> None:
    original = decoded(make())
    model = run(make(), modifier(), tmp_path / "out")
    read = type(model).from_pretrained(tmp_path / "out")
    assert torch.equal(decoded(read), decoded(model))
    assert not torch.equal(decoded(read), original)
    with torch.no_grad():  # and it runs without a cache, in memory
        model(small.probe(), use_cache=False)
