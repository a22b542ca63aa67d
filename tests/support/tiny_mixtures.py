# SPDX-License-Identifier: Apache-2.0
"""Tiny random mixtures of experts, of several families."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

EXPERTS = 8
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": EXPERTS}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
FAMILIES = list(_FAMILIES)
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def mixture(family: str, *, mixtures: int = 2, experts: int = EXPERTS, **changes: Any) -> Any:
    """A model of mixtures of experts; routers have random weights too."""
    kind, config, own = _FAMILIES[family]
    torch.manual_seed(0)
    counts = {name: experts for name in _COUNTS if name in own}
    layers = mixtures + own.get("first_k_dense_replace", 0)
    sizes = {**COMMON, **own, **counts, "num_hidden_layers": layers, **changes}
    model = kind(config(**sizes)).eval().float()
    with torch.no_grad():
        for block in blocks(model):
            block.gate.weight.normal_(std=0.5)
            bias = getattr(block.gate, "e_score_correction_bias", None)
            if bias is not None:
                bias.normal_(std=0.05)
    return model


def blocks(model: Any) -> list[Any]:
    """The modules that hold a router and experts."""
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
