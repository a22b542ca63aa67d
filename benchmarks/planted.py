# SPDX-License-Identifier: Apache-2.0
"""Copies of the embedded model: with outlier channels of known place and size, or with zeros."""

from __future__ import annotations

import shutil
from pathlib import Path

from models import MODELS, PICO, TOKENIZER_FILES

CHANNELS = (3, 77, 200)
SIZE = 64.0
"""A power of two: what is multiplied and divided by it keeps all its bits."""
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def planted() -> Path:
    """The model whose norms return ``CHANNELS`` times ``SIZE``; it computes what it did."""
    model = _embedded()
    for layer in model.model.layers:
        for norm, readers in _READERS.items():
            layer.get_submodule(norm).weight.data[list(CHANNELS)] *= SIZE
            for reader in readers:
                layer.get_submodule(reader).weight.data[:, list(CHANNELS)] /= SIZE
    return _saved(model, MODELS / "pico-planted")


def pruned_by_magnitude(structure: str, folder: Path) -> Path:
    """The model with half of each Linear's weights zeroed, those of least magnitude.

    Args:
        structure: ``"0:0"`` for zeros anywhere in a row's weights, or ``"N:M"`` for N in each M.
        folder: where to write it.
    """
    import torch  # noqa: PLC0415

    model = _embedded()
    zeros, of = (int(part) for part in structure.split(":"))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            W_RC = module.weight.data
            part = W_RC.view(-1, of) if of else W_RC.view(1, -1)
            least = part.float().abs().topk(zeros or part.shape[1] // 2, largest=False).indices
            part.scatter_(1, least, 0.0)
    return _saved(model, folder)


def _embedded():
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(PICO, dtype="auto")


def _saved(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(PICO / name, folder)
    return folder
