# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of many architectures, in sizes that the kernels of servers take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from models import MODELS

_PLAIN: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALL_HEADS = {**_PLAIN, "num_key_value_heads": 4}
_SPARSE = {
    **_PLAIN,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts"), 1),
}
_LATENT = {
    **_SPARSE,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
_STATES = {
    "state_size": 16,
    "mamba_d_state": 16,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "expand": 2,
    "n_groups": 1,
    "chunk_size": 32,
    "mamba_chunk_size": 32,
}
_UNTOUCHED = ("A_log", "dt_bias", ".D", "conv1d", "e_score_correction_bias")

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", _PLAIN),
    "Llama, tied head": ("Llama", {**_PLAIN, "tie_word_embeddings": True}),
    "Mistral": ("Mistral", _PLAIN),
    "Qwen 2": ("Qwen2", _PLAIN),
    "Qwen 3": ("Qwen3", _PLAIN),
    "Gemma": ("Gemma", _PLAIN),
    "Gemma 2": ("Gemma2", {**_PLAIN, **_WINDOWS, "tie_word_embeddings": True}),
    "Gemma 3": ("Gemma3Text", {**_PLAIN, **_WINDOWS, "tie_word_embeddings": True}),
    "Phi-3": ("Phi3", _PLAIN),
    "OPT": ("OPT", {**_PLAIN, "ffn_dim": 256, "word_embed_proj_dim": 128}),
    "Granite": ("Granite", _PLAIN),
    "OLMo 2": ("Olmo2", _PLAIN),
    "OLMo 3": ("Olmo3", {**_PLAIN, **_WINDOWS}),
    "Cohere": ("Cohere", {**_PLAIN, "tie_word_embeddings": True}),
    "Cohere 2": ("Cohere2", {**_PLAIN, **_WINDOWS, "tie_word_embeddings": True}),
    "StableLM": ("StableLm", _PLAIN),
    "StarCoder 2": ("Starcoder2", _PLAIN),
    "GPT-NeoX": ("GPTNeoX", _ALL_HEADS),
    "Bloom": ("Bloom", {**_PLAIN, "n_layer": 2, "n_head": 4, "tie_word_embeddings": True}),
    "Falcon": ("Falcon", {**_PLAIN, "num_kv_heads": 1, "tie_word_embeddings": True}),
    "Nemotron": ("Nemotron", _PLAIN),
    "EXAONE 4": ("Exaone4", {**_PLAIN, **_WINDOWS}),
    "GLM 4": ("Glm4", _PLAIN),
    "SmolLM 3": ("SmolLM3", _PLAIN),
    "Seed-OSS": ("SeedOss", _PLAIN),
    "ERNIE 4.5": ("Ernie4_5", _PLAIN),
    "Mixtral": ("Mixtral", _SPARSE),
    "Qwen 2 MoE": ("Qwen2Moe", _SPARSE),
    "Qwen 3 MoE": ("Qwen3Moe", _SPARSE),
    "OLMoE": ("Olmoe", {**_SPARSE, "num_key_value_heads": 4}),
    "Granite MoE": ("GraniteMoe", _SPARSE),
    "GLM 4 MoE": ("Glm4Moe", _SPARSE),
    "DeepSeek V2": ("DeepseekV2", {**_LATENT, "topk_method": "greedy"}),
    "DeepSeek V3": ("DeepseekV3", _LATENT),
    "GPT-OSS": ("GptOss", {**_SPARSE, "sliding_window": 64, "intermediate_size": 128}),
    "Llama 4": (
        "Llama4Text",
        {
            **_SPARSE,
            "num_experts_per_tok": 1,
            "intermediate_size": 128,
            "intermediate_size_mlp": 256,
            "attention_chunk_size": 128,
        },
    ),
    "Mamba": ("Mamba", {**_PLAIN, **_STATES}),
    "Mamba 2": ("Mamba2", {**_PLAIN, **_STATES, "num_heads": 8, "head_dim": 32}),
    "Falcon-H1": ("FalconH1", {**_PLAIN, **_STATES}),
    "Granite 4 hybrid": (
        "GraniteMoeHybrid",
        {
            **_SPARSE,
            **_STATES,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "Bamba": ("Bamba", {**_PLAIN, **_STATES, "attn_layer_indices": [1]}),
    "Jamba": (
        "Jamba",
        {
            **_SPARSE,
            **_STATES,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
}
"""Name → family of transformers, and fields of its configuration, of which it takes its own."""
_PUBLISHED = {
    "DeepSeek V3": {"topk_method": "noaux_tc"},
    "GLM 4 MoE": {"head_dim": 32},
}
"""Fields of published configurations that servers read, and that transformers no longer has."""
_CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "Llama4Text": "Llama4ForCausalLM"}


def saved(name: str) -> Path:
    """Folder of a model in bfloat16, which is built on the first call."""
    folder = MODELS / "serving" / name
    if not (folder / "config.json").exists():
        _build(name).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _build(name: str) -> Any:
    """A model whose matrices keep the size of what they are given, and whose norms differ."""
    family, fields = ARCHITECTURES[name]
    kind = getattr(transformers, f"{family}Config")
    plain = kind()  # vLLM reads fields that transformers leaves alone, such as shared experts
    taken = {key for key in fields if hasattr(plain, key)}
    taken -= {key for key in taken if isinstance(getattr(kind, key, None), property)}
    config = kind(**{key: fields[key] for key in fields if key in taken})
    for key, value in _PUBLISHED.get(name, {}).items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = getattr(transformers, _CLASSES.get(family, f"{family}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if any(own.endswith(last) or last in own for last in _UNTOUCHED):
                continue
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model
