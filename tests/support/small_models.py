# SPDX-License-Identifier: Apache-2.0
"""Tiny random models and token data, and what is compared before and after a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tests.support.manifests import stable_bytes
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 128


def llama(*, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers, hidden 128, intermediate 256; parameters in bfloat16, buffers in float32."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": torch.bfloat16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()


def one_block(*, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """For what is about runs, not about what goes from one block to the next."""
    return llama(seed=seed, **{"num_hidden_layers": 1, "intermediate_size": 128, **changes})


def mixture(*, blocks: int = 2) -> Qwen3MoeForCausalLM:
    """Blocks of eight experts, two for a token."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()


def token_rows(samples: int = 8, length: int = 16, *, seed: int = 0) -> Dataset:
    """Random token ids, already tokenized."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
    return Dataset.from_dict({"input_ids": ids.tolist()})


def probe() -> Tensor:
    """Token ids ``[2, 12]`` to compare logits on."""
    return torch.arange(3, 27).reshape(2, 12)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """The model's logits on :func:`probe`."""
    found: Tensor = model(probe().to(model.device)).logits
    return found


def tree(folder: Path) -> dict[str, str]:
    """Every path below ``folder`` and a digest of its bytes (a folder's is empty).

    Of a manifest what differs from run to run is left out.
    """
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(stable_bytes(path)).hexdigest() if path.is_file() else ""
        )
        for path in sorted(folder.rglob("*"))
    }


def fingerprint(model: Module) -> dict[str, Any]:
    """What of each module could betray a broken-off run: attributes and hooks, not weights."""
    return {
        name: (
            type(module),
            {key for key in vars(module) if not key.startswith("_is_hf")},
            list(module._parameters),
            list(module._buffers),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            module.training,
        )
        for name, module in model.named_modules()
    }


@contextmanager
def counted_forwards() -> Iterator[list[str]]:
    """Class names of the modules that ran inside, one per call."""
    calls: list[str] = []
    handle = register_module_forward_pre_hook(lambda module, _: calls.append(type(module).__name__))
    try:
        yield calls
    finally:
        handle.remove()
