# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama, tokens for it, and runs of modifiers on it in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor.core.modifier import Modifier
from llmcompressor.entrypoints.oneshot import oneshot

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Batch = dict[str, Tensor]


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Two layers, random weights that are large enough for errors to show."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def recompute(model: Any, *, reentrant: bool) -> None:
    """Turn activation checkpointing on, by the name that transformers has for it."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": reentrant})


def batches(*, tokens: int = 24, number: int = 8, seed: int = 1) -> list[Batch]:
    """Batches of two rows, all tokens real."""
    torch.manual_seed(seed)
    ids = torch.randint(3, SIZES["vocab_size"], (number, 2, tokens))
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


def padded(given: Sequence[Batch], by: int) -> list[Batch]:
    """The same tokens, with ``by`` positions of padding to the right of each row.

    The padding is made of tokens too, and of many, so that counting it would show: the padding
    token of the model has an embedding of zero.
    """
    fill = 3 + torch.arange(by) % (SIZES["vocab_size"] - 3)
    found = []
    for batch in given:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        more = fill.expand(len(ids), by)
        found.append(
            {
                "input_ids": torch.cat([ids, more], dim=1),
                "attention_mask": torch.cat([mask, torch.zeros_like(more)], dim=1),
            }
        )
    return found


def run(
    model: Module, *modifiers: Modifier, data: Sequence[Batch] | None = None, **arguments: Any
) -> Any:
    """``oneshot`` in memory."""
    rows: Any = list(data or batches())
    loader: Any = DataLoader(rows, batch_size=None)
    return oneshot(model=model, recipe=list(modifiers), dataset=loader, **arguments)


@torch.no_grad()
def logits(model: Any, given: Sequence[Batch]) -> Tensor:
    """Of all batches, joined."""
    return torch.cat([model(**batch).logits.float() for batch in given])


def inputs_of(model: Any, name: str, given: Sequence[Batch]) -> Tensor:
    """What goes into a module at real tokens, ``[tokens, columns]``."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    for batch in given:
        logits(model, [batch])
        seen[-1] = seen[-1][batch["attention_mask"].bool()]
    handle.remove()
    return torch.cat(seen)


def linears(model: Module) -> dict[str, Any]:
    """The Linears of the decoder layers."""
    named = model.named_modules()
    return {n: m for n, m in named if isinstance(m, Linear) and n != "lm_head"}


def traces(model: Module) -> dict[str, list[str]]:
    """What runs leave on modules: hooks, wrapped forwards, marks, parameters. Empty if nothing."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        left = [f"hook {hook}" for hook in module._forward_pre_hooks.values()]
        left += [f"hook {hook}" for hook in module._forward_hooks.values()]
        left += [key for key in module.__dict__ if key == "forward" or key.startswith("quantiz")]
        left += [key for key in module._parameters if key not in ("weight", "bias")]
        left += [key for key in module._modules if key in ("impl", "kv_cache")]
        if left:
            found[name] = left
    return found
