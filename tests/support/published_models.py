# SPDX-License-Identifier: Apache-2.0
"""Configurations of published models, and the headers of their files, written out."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_70B: dict[str, Any] = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA_3_405B: dict[str, Any] = LLAMA_3_8B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

Shape = tuple[int, ...]


def tensors_of(config: Mapping[str, Any]) -> dict[str, Shape]:
    """The tensors of a published checkpoint: name → shape."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    found: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer(config, layer):
            found[f"model.layers.{layer}.{name}"] = shape
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocabulary, hidden)
    return found


def _layer(config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, Shape]]:
    hidden = config["hidden_size"]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    attention = _latent(config) if "kv_lora_rank" in config else _attention(config)
    for name, shape in attention:
        yield f"self_attn.{name}", shape
    yield from _feed_forward(config, layer)


def _feed_forward(config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, kind = config["hidden_size"], config["model_type"]
    if kind == "mixtral":
        experts, inner = config["num_local_experts"], config["intermediate_size"]
        yield "block_sparse_moe.gate.weight", (experts, hidden)
        yield from _experts("block_sparse_moe", experts, hidden, inner, ("w1", "w3", "w2"))
    elif kind == "qwen3_moe" or layer >= config.get("first_k_dense_replace", layer + 1):
        experts = config.get("num_experts") or config["n_routed_experts"]
        inner = config["moe_intermediate_size"]
        yield "mlp.gate.weight", (experts, hidden)
        if kind == "deepseek_v3":
            yield "mlp.gate.e_score_correction_bias", (experts,)
            for own, shape in _mlp(hidden, inner):
                yield f"mlp.shared_experts.{own}", shape
        yield from _experts("mlp", experts, hidden, inner)
    else:
        for own, shape in _mlp(hidden, config["intermediate_size"]):
            yield f"mlp.{own}", shape


_NAMES = ("gate_proj", "up_proj", "down_proj")


def _experts(
    prefix: str, count: int, hidden: int, inner: int, names: tuple[str, str, str] = _NAMES
) -> Iterator[tuple[str, Shape]]:
    for expert in range(count):
        for own, shape in _mlp(hidden, inner, names):
            yield f"{prefix}.experts.{expert}.{own}", shape


def _mlp(
    hidden: int, inner: int, names: tuple[str, str, str] = _NAMES
) -> Iterator[tuple[str, Shape]]:
    gate, up, down = names
    yield f"{gate}.weight", (inner, hidden)
    yield f"{up}.weight", (inner, hidden)
    yield f"{down}.weight", (hidden, inner)


def _attention(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    keys = config["num_key_value_heads"] * width
    yield "q_proj.weight", (heads * width, hidden)
    yield "k_proj.weight", (keys, hidden)
    yield "v_proj.weight", (keys, hidden)
    yield "o_proj.weight", (hidden, heads * width)
    if config["model_type"].startswith("qwen3"):
        yield "q_norm.weight", (width,)
        yield "k_norm.weight", (width,)


def _latent(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (config[f"{key}_head_dim"] for key in ("qk_nope", "qk_rope", "v"))
    queries, latent = config["q_lora_rank"], config["kv_lora_rank"]
    yield "q_a_proj.weight", (queries, hidden)
    yield "q_a_layernorm.weight", (queries,)
    yield "q_b_proj.weight", (heads * (nope + rope), queries)
    yield "kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "kv_a_layernorm.weight", (latent,)
    yield "kv_b_proj.weight", (heads * (nope + value), latent)
    yield "o_proj.weight", (hidden, heads * value)


def write_headers(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Shape]) -> Path:
    """A folder with config.json and a weight file that ends behind its header."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in tensors.items():
        size = source_bytes(name, shape)
        entries[name] = {
            "dtype": "F32" if is_wide(name) else "BF16",
            "shape": list(shape),
            "data_offsets": [begin, begin + size],
        }
        begin += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder


def is_wide(name: str) -> bool:
    """Whether a tensor is stored in float32; all others are in bfloat16."""
    return name.endswith("e_score_correction_bias")


def source_bytes(name: str, shape: Shape) -> int:
    """Bytes of a tensor's data."""
    return prod(shape) * (4 if is_wide(name) else 2)


SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL_OF_ITS_KIND: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 128,
        "moe_intermediate_size": 128,
        "n_group": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "topk_group": 1,
        "v_head_dim": 32,
    },
}


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of the same structure, with few and tiny blocks."""
    return {**config, **SMALL, **_SMALL_OF_ITS_KIND[config["model_type"]]}


def write_weights(folder: Path, config: Mapping[str, Any], *, seed: int = 0) -> Path:
    """A folder with config.json and random weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensors_of(config).items():
        dtype = torch.float32 if is_wide(name) else torch.bfloat16
        tensors[name] = torch.randn(shape, generator=generator).mul_(0.05).to(dtype)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
