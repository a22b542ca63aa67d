# SPDX-License-Identifier: Apache-2.0
"""Tiny models of the architectures that llm-compressor lists mappings for, and what is meant.

Those of :mod:`small_architectures` are not said again. What transformers has no code for stands
under a name of the same parts: Step 3.7 for 3.5 (the same decoder). Of each family every form of
decoder layer is told, in the order of the model. Every head has its own values, or nothing would
lead from ``v_proj`` to ``o_proj``.
"""

from __future__ import annotations

from typing import Any

import transformers

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SPARSE: dict[str, Any] = {
    **_TINY,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts"), 1),
}
_LATENT: dict[str, Any] = {
    **_SPARSE,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_LINEAR: dict[str, Any] = {
    **_SPARSE,
    **_HYBRID,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_SIGHT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "out_hidden_size": 64,
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
}
_HEARING: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "max_source_positions": 16,
    "output_dim": 64,
}
_IDS = {"image_token_id": 5, "video_token_id": 6}

CONFIGS: dict[str, dict[str, Any]] = {
    "Afmoe": {**_SPARSE, "num_dense_layers": 1},
    "Bloom": {**_TINY, "n_layer": 2, "n_head": 4},
    "Cohere2": {**_TINY, **_WINDOWS},
    "Cohere2Moe": {**_SPARSE, **_WINDOWS, "first_k_dense_replace": 0},
    "Cohere2Vision": {**_IDS, "text_config": {**_TINY, **_WINDOWS}, "vision_config": _SIGHT},
    "DeepseekV2": {**_LATENT, "topk_method": "greedy"},
    "Ernie4_5_Moe": {**_SPARSE, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "Exaone4": {**_TINY, **_WINDOWS},
    "Gemma2": {**_TINY, **_WINDOWS},
    "Gemma3": {**_IDS, "text_config": {**_TINY, **_WINDOWS}, "vision_config": _SIGHT},
    "Glm4Moe": _SPARSE,
    "Glm4MoeLite": _LATENT,
    "GlmMoeDsa": {**_LATENT, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 2},
    "Granite": _TINY,
    "Mistral": _TINY,
    "Mistral3": {
        **_IDS,
        "text_config": {**_TINY, "model_type": "mistral"},
        "vision_config": {**_SIGHT, "model_type": "pixtral", "head_dim": 16},
    },
    "MuseGlimmer": {
        **_IDS,
        "text_config": {**_TINY, **_WINDOWS},
        "vision_config": _SIGHT,
        "out_hidden_size": 64,
        "projector_hidden_size": 64,
    },
    "Olmo": _TINY,
    "Olmo3": {**_TINY, **_WINDOWS},
    "Qwen2": _TINY,
    "Qwen2_5OmniThinker": {
        **{f"{kind}_token_index": 5 + n for n, kind in enumerate(("audio", "image", "video"))},
        "text_config": {**_TINY, "rope_parameters": _MROPE},
        "vision_config": _SIGHT,
        "audio_config": _HEARING,
    },
    "Qwen2_5_VL": {
        **_IDS,
        "text_config": {**_TINY, "rope_parameters": _MROPE},
        "vision_config": _SIGHT,
    },
    "Qwen3Next": _LINEAR,
    "Qwen3_5": _LINEAR,
    "Qwen3_5Moe": _LINEAR,
    "SeedOss": _TINY,
    "Step3p7": {
        **_IDS,
        "text_config": {
            **_SPARSE,
            **_WINDOWS,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": _SIGHT,
    },
    "Whisper": {
        **_HEARING,
        "vocab_size": 96,
        "d_model": 64,
        "num_mel_bins": 16,
        "decoder_layers": 1,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 128,
        "max_target_positions": 64,
        "decoder_start_token_id": 1,
        **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), 2),
    },
}
"""Architecture → its configuration; names that a family does not know do no harm."""

_QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
_GATE_UP = "mlp.gate_proj mlp.up_proj"
_EXPERTS = "mlp.experts.*.gate_proj mlp.experts.*.up_proj"
_V_TO_O = {"self_attn.v_proj": "self_attn.o_proj"}
_DOWN = {"mlp.up_proj": "mlp.down_proj"}
_EACH_DOWN = {"mlp.experts.*.up_proj": "mlp.experts.*.down_proj"}


def _shared(name: str) -> tuple[str, dict[str, str]]:
    """What reads the norm before a mixture with shared experts, and what is linked within it."""
    own = f"mlp.{name}"
    down = {f"{own}.up_proj": f"{own}.down_proj", **_EACH_DOWN}
    return f"mlp.gate {own}.gate_proj {own}.up_proj {_EXPERTS}", down


_MIXED, _MIXED_DOWN = _shared("shared_experts")
_QWEN_MIXED, _QWEN_DOWN = _shared("shared_expert")
_QWEN_MIXED += " mlp.shared_expert_gate"

_ATTENTION = {"input_layernorm": _QKV, **_V_TO_O}
_GATED = {"input_layernorm": f"{_QKV} self_attn.gate_proj", **_V_TO_O}
_PLAIN = {**_ATTENTION, "post_attention_layernorm": _GATE_UP, **_DOWN}
_GEMMA = {**_ATTENTION, "pre_feedforward_layernorm": _GATE_UP, **_DOWN}
_COHERE = {"input_layernorm": f"{_QKV} {_GATE_UP}", **_V_TO_O, **_DOWN}
_MIXTURE = {"post_attention_layernorm": _MIXED, **_MIXED_DOWN}
_QWEN_MIXTURE = {"post_attention_layernorm": _QWEN_MIXED, **_QWEN_DOWN}
_MLA = {
    "input_layernorm": "self_attn.q_a_proj self_attn.kv_a_proj_with_mqa",
    "self_attn.q_a_layernorm": "self_attn.q_b_proj",
    "self_attn.kv_a_layernorm": "self_attn.kv_b_proj",
}
_DSA = {
    **_MLA,
    "input_layernorm": f"{_MLA['input_layernorm']} self_attn.indexer.wk "
    "self_attn.indexer.weights_proj",
    "self_attn.q_a_layernorm": "self_attn.q_b_proj self_attn.indexer.wq_b",
}
_MLP = {"post_attention_layernorm": _GATE_UP, **_DOWN}
_DELTA = {
    "input_layernorm": "linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.in_proj_b "
    "linear_attn.in_proj_a"
}
_NEXT_DELTA = {"input_layernorm": "linear_attn.in_proj_qkvz linear_attn.in_proj_ba"}
_STEP = {"input_layernorm": f"{_QKV} self_attn.g_proj", **_V_TO_O}
_AUDIO = {
    "self_attn_layer_norm": _QKV,
    "self_attn.v_proj": "self_attn.out_proj",
    "final_layer_norm": "fc1",
}

LINKS: dict[str, list[dict[str, str]]] = {
    "Afmoe": [
        {**_GATED, "pre_mlp_layernorm": _GATE_UP, **_DOWN},
        {
            **_GATED,
            "pre_mlp_layernorm": _MIXED.replace("mlp.gate ", "mlp.router.gate "),
            **_MIXED_DOWN,
        },
    ],
    # q, k and v are interleaved there, and no factor passes a GELU
    "Bloom": [
        {
            "input_layernorm": "self_attention.query_key_value",
            "post_attention_layernorm": "mlp.dense_h_to_4h",
        }
    ],
    "Cohere2": [_COHERE],
    "Cohere2Moe": [{"input_layernorm": f"{_QKV} {_MIXED}", **_V_TO_O, **_MIXED_DOWN}],
    "Cohere2Vision": [_COHERE],
    "DeepseekV2": [{**_MLA, **_MLP}, {**_MLA, **_MIXTURE}],
    "Ernie4_5_Moe": [_PLAIN, {**_ATTENTION, **_MIXTURE}],
    "Exaone4": [{**_V_TO_O, **_DOWN}],  # norms behind attention and MLP, as in Olmo 3
    "Gemma2": [_GEMMA],
    "Gemma3": [_GEMMA],
    "Glm4Moe": [_PLAIN, {**_ATTENTION, **_MIXTURE}],
    "Glm4MoeLite": [{**_MLA, **_MLP}, {**_MLA, **_MIXTURE}],
    "GlmMoeDsa": [{**_DSA, **_MLP}, {**_DSA, **_MIXTURE}],
    "Granite": [_PLAIN],
    "Mistral": [_PLAIN],
    "Mistral3": [_PLAIN],
    "MuseGlimmer": [{**_GATED, "pre_feedforward_layernorm": _GATE_UP, **_DOWN}],
    "Olmo": [{**_V_TO_O, **_DOWN}],  # its norms have no weights
    "Olmo3": [{**_V_TO_O, **_DOWN}],
    "Qwen2": [_PLAIN],
    "Qwen2_5OmniThinker": [_PLAIN],
    "Qwen2_5_VL": [_PLAIN],
    "Qwen3Next": [{**_NEXT_DELTA, **_QWEN_MIXTURE}, {**_ATTENTION, **_QWEN_MIXTURE}],
    "Qwen3_5": [{**_DELTA, **_MLP}, _PLAIN],
    "Qwen3_5Moe": [{**_DELTA, **_QWEN_MIXTURE}, {**_ATTENTION, **_QWEN_MIXTURE}],
    "SeedOss": [_PLAIN],
    "Step3p7": [{**_STEP, **_MLP}, {**_STEP, **_MIXTURE}],
    "Whisper": [
        _AUDIO,
        {
            **_AUDIO,
            "encoder_attn_layer_norm": "encoder_attn.q_proj",
            "encoder_attn.v_proj": "encoder_attn.out_proj",
        },
    ],
}
"""Architecture → for each form of layer, smooth module → the modules that read it."""

_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")
_CONFIG_OF = {"Qwen3_5": "Qwen3_5Text", "Qwen3_5Moe": "Qwen3_5MoeText"}


def classes_of(name: str) -> tuple[type[Any], type[Any]]:
    """The class of a model and that of its configuration."""
    config = getattr(transformers, f"{_CONFIG_OF.get(name, name)}Config")
    found = (getattr(transformers, f"{name}{suffix}", None) for suffix in _SUFFIXES)
    if "text_config" in CONFIGS[name] or name == "Whisper":
        found = (getattr(transformers, f"{name}{suffix}", None) for suffix in _SUFFIXES[::-1])
    return next(one for one in found if one is not None), config
