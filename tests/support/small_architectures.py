# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of many architectures."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from llmcompressor.checkpoint.moe_names import unfuse_stored_experts
from llmcompressor.moe.linear_experts import find_stacked_moes

_PLAIN: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALL_HEADS = {**_PLAIN, "num_key_value_heads": 4}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _PLAIN),
    "llama_all_heads": ("Llama", _ALL_HEADS),
    "qwen3": ("Qwen3", {**_PLAIN, "head_dim": 16}),
    "gemma3": ("Gemma3Text", {**_ALL_HEADS, "head_dim": 16}),
    "phi3": ("Phi3", _ALL_HEADS),
    "mixtral": ("Mixtral", {**_PLAIN, "num_local_experts": 4}),
    "opt": (
        "OPT",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 64,
            **_SPECIAL,
        },
    ),
    "gpt_neox": ("GPTNeoX", {**_PLAIN, "num_key_value_heads": None}),
    "cohere": ("Cohere", _PLAIN),
    "olmo2": ("Olmo2", _PLAIN),
    "gpt2": (
        "GPT2",
        {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, **_SPECIAL},
    ),
    "deepseek": (
        "DeepseekV3",
        {
            **_ALL_HEADS,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
}
_MODELS["qwen3_moe"] = (
    "Qwen3Moe",
    {
        **_PLAIN,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
)
_MODELS["qwen2_moe"] = (
    "Qwen2Moe",
    {
        **_PLAIN,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
)
_MODELS["llama4"] = (
    "Llama4Text",
    {
        **_PLAIN,
        "head_dim": 16,
        "intermediate_size": 32,
        "intermediate_size_mlp": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 64,
    },
)
_MODELS["gpt_oss"] = (
    "GptOss",
    {
        **_PLAIN,
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
)
_PARTS: dict[str, Any] = {"text_config": transformers.LlamaConfig(**_ALL_HEADS)}
_PARTS["vision_config"] = transformers.CLIPVisionConfig(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=8,
    patch_size=4,
)
_MODELS["llava"] = ("Llava", {**_PARTS, "image_token_id": 5})
_MODELS["gemma3n"] = (
    "Gemma3nText",
    {
        **_ALL_HEADS,
        "head_dim": 16,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 96,
        "laurel_rank": 16,
    },
)
_MODELS["xlm"] = (
    "XLM",
    {
        "vocab_size": 96,
        "emb_dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 64,
        **_SPECIAL,
    },
)
_CLASSES = {
    "Gemma3nText": "Gemma3nForCausalLM",
    "XLM": "XLMWithLMHeadModel",
    "Gemma3Text": "Gemma3ForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Llama4Text": "Llama4ForCausalLM",
    "Llava": "LlavaForConditionalGeneration",
}


def build(name: str, **changes: Any) -> Any:
    """A model with two layers, in evaluation mode; norm weights are not all the same.

    Args:
        name: of the architecture.
        changes: to its configuration.
    """
    family, fields = _MODELS[name]
    fields = {**fields, **changes}
    config = getattr(transformers, f"{family}Config")(
        **{key: value for key, value in fields.items() if value is not None}
    )
    torch.manual_seed(0)
    model = getattr(transformers, _CLASSES.get(family, f"{family}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def with_experts(name: str, **changes: Any) -> Any:
    """The same, its experts taken apart; routers and experts have weights that matter."""
    model = build(name, **changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 and (".mlp." in key or ".feed_forward." in key):
                parameter.normal_(std=0.2)
    unfuse_stored_experts(model, find_stacked_moes(model))
    return model


class OneBlock(nn.Module):
    """A model that is nothing but one block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block])

    def forward(self, states: Tensor) -> Tensor:
        states = self.layers[0](states)
        return states
