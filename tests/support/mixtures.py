# SPDX-License-Identifier: Apache-2.0
"""Tiny mixtures of experts with random weights, of families that differ in layout and names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "head_dim": 16,
    },
    "llama4_text": {
        **EXPERTS,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 256,
        "interleave_moe_layer_step": 1,
    },
    "granitemoe": EXPERTS,
    "gpt_oss": {
        **EXPERTS,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
PREFIXES = {
    "mixtral": "model.layers.1.block_sparse_moe.experts",
    "qwen3_moe": "model.layers.1.mlp.experts",
    "deepseek_v3": "model.layers.1.mlp.experts",
    "llama4_text": "model.layers.1.feed_forward.experts",
}
"""What servers expect the experts of a layer to be called (S68)."""


def build(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Random weights of one spread, so that experts matter and routes differ."""
    torch.manual_seed(seed)
    given = {**SIZES, **FAMILIES[family], **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    return model


def saved(family: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """A model, and its checkpoint in ``folder``, in several files."""
    model = build(family, **changes)
    model.save_pretrained(folder, max_shard_size="700KB")
    return model


def rows(samples: int = 8, length: int = 32) -> Dataset:
    """Random token ids."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=random)
    return Dataset.from_dict({"input_ids": ids.tolist()})


def probe() -> Tensor:
    """Token ids ``[2, 12]``."""
    return torch.arange(3, 27).reshape(2, 12)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """On :func:`probe`."""
    found: Tensor = model(probe()).logits
    return found


def names(folder: Path) -> set[str]:
    """All tensors of a checkpoint."""
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as reader:
            found |= set(reader.keys())
    return found
