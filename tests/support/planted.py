# SPDX-License-Identifier: Apache-2.0
"""The embedded model with outlier channels of known place and size, and text for it."""

from __future__ import annotations

import heapq
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

CHANNELS = (7, 101, 200)
"""Channels of every norm's output that are made large."""
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def planted(folder: Path, size: float) -> Any:
    """Two layers in float32, whose norms return ``CHANNELS`` times ``size``; the same function."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, num_hidden_layers=2
    ).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, readers in _READERS.items():
                layer.get_submodule(norm).weight[list(CHANNELS)] *= size
                for reader in readers:
                    layer.get_submodule(reader).weight[:, list(CHANNELS)] /= size
    return model


def text(folder: Path) -> list[dict[str, Tensor]]:
    """Eight batches of 2 x 64 tokens of Python code."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sources = "".join(Path(str(one.__file__)).read_text() for one in (heapq, textwrap))
    ids = torch.tensor(tokenizer(sources, verbose=False)["input_ids"][: 8 * 128])
    return [
        {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        for rows in ids.reshape(8, 2, 64)
    ]
