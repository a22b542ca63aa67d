# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of many architectures, and batches for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.nn import Module

VOCABULARY = 64
LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE_TOKEN = 62

Batch = dict[str, Any]


def text_batches(count: int = 3, length: int = 10, rows: int = 2, seed: int = 0) -> list[Batch]:
    """Right-padded batches of token ids; the first row of each is full.

    Each is one token longer than the last: equal ones would be run as one.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(count):
        ids = torch.randint(3, 60, (rows, length + index), generator=generator)
        mask = torch.ones_like(ids)
        mask[1:, length - 2 :] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return batches


def translation_batches() -> list[Batch]:
    targets = text_batches(seed=1, length=6)
    return [
        {
            **source,
            "decoder_input_ids": target["input_ids"],
            "decoder_attention_mask": target["attention_mask"],
        }
        for source, target in zip(text_batches(), targets, strict=True)
    ]


def speech_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [
        {
            "input_features": torch.randn(2, 8, 16, generator=generator),
            "decoder_input_ids": target["input_ids"],
            "decoder_attention_mask": target["attention_mask"],
        }
        for target in text_batches(length=6)
    ]


def image_batches() -> list[Batch]:
    """Four patches of one image, then text."""
    generator = torch.Generator().manual_seed(3)
    batches = text_batches(length=12)
    for batch in batches:
        batch["input_ids"][:, 1:5] = IMAGE_TOKEN
        batch["pixel_values"] = torch.randn(2, 3, 8, 8, generator=generator)
    return batches


@dataclass(frozen=True)
class Architecture:
    """How to make a model, and what to calibrate it with."""

    make: Callable[[], Module]
    batches: Callable[[], list[Batch]] = text_batches
    leaf: str = "Linear"
    """The class of its matrices."""
    ignore: list[str] = field(default_factory=lambda: ["lm_head"])
    """The head, and what the model never calls but takes the weight of."""


def llama(**changes: Any) -> Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, **changes}))


def qwen3() -> Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=16))


def gemma3() -> Module:
    config = hf.Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    return hf.Gemma3ForCausalLM(config)


def phi3() -> Module:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**SIZES))


def gpt2() -> Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=2, n_positions=64, **SPECIAL
    )
    return hf.GPT2LMHeadModel(config)


def opt() -> Module:
    config = hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        **SPECIAL,
    )
    return hf.OPTForCausalLM(config)


def mixtral() -> Module:
    config = hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return hf.MixtralForCausalLM(config)


def qwen3_moe() -> Module:
    config = hf.Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[0],
    )
    return hf.Qwen3MoeForCausalLM(config)


def whisper() -> Module:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **SPECIAL,
    )
    return hf.WhisperForConditionalGeneration(config)


def t5() -> Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=LAYERS,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def llava(vocabulary: int = VOCABULARY, image_token: int = IMAGE_TOKEN) -> Module:
    vision = hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = hf.LlavaConfig(
        vision_config=vision,
        text_config=hf.LlamaConfig(**{**SIZES, "vocab_size": vocabulary}),
        image_token_index=image_token,
        vision_feature_layer=-1,
    )
    return hf.LlavaForConditionalGeneration(config)


def mamba() -> Module:
    config = hf.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=LAYERS,
        time_step_rank=4,
        expand=2,
        conv_kernel=2,
    )
    return hf.MambaForCausalLM(config)


def recurrent_gemma() -> Module:
    sizes = {**SIZES, "num_hidden_layers": 3}  # two recurrent blocks, one of attention
    config = hf.RecurrentGemmaConfig(**sizes, lru_width=32, attention_window_size=8, head_dim=16)
    return hf.RecurrentGemmaForCausalLM(config)


def xlm() -> Module:
    """It makes a cache whatever its configuration says, and each block writes to it."""
    config = hf.XLMConfig(
        vocab_size=VOCABULARY,
        emb_dim=32,
        n_layers=LAYERS,
        n_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return hf.XLMWithLMHeadModel(config)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(llama),
    "qwen3": Architecture(qwen3),
    "gemma3": Architecture(gemma3),
    "phi3": Architecture(phi3),
    "gpt2": Architecture(gpt2, leaf="Conv1D"),
    "opt": Architecture(opt),
    "mixtral": Architecture(mixtral),
    "qwen3_moe": Architecture(qwen3_moe),
    "whisper": Architecture(whisper, speech_batches, ignore=["proj_out"]),
    "t5": Architecture(t5, translation_batches),
    "llava": Architecture(llava, image_batches),
    "mamba": Architecture(mamba, ignore=["lm_head", "re:.*dt_proj"]),
    "xlm": Architecture(xlm, ignore=["pred_layer.proj"]),
    "recurrent_gemma": Architecture(recurrent_gemma),
}


def build(name: str, seed: int = 0) -> Module:
    """A random model in evaluation mode; equal seeds give equal models."""
    torch.manual_seed(seed)
    return ARCHITECTURES[name].make().eval()


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor of a model's output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def leaves(model: Module, class_name: str, ignore: list[str]) -> dict[Module, str]:
    """The modules of a class, by module."""
    return {
        module: name
        for name, module in model.named_modules()
        if type(module).__name__ == class_name and not is_ignored(name, ignore)
    }


def is_ignored(name: str, ignore: list[str]) -> bool:
    return any(
        re.match(one.removeprefix("re:"), name) if one.startswith("re:") else one == name
        for one in ignore
    )
