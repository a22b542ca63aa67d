# SPDX-License-Identifier: Apache-2.0
"""Causal language models to evaluate, loaded with all of their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from llmcompressor.checkpoint.load import (
    check_quantization_declared,
    load_config,
    load_pretrained,
    loading_errors,
)
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.errors import ArgumentError, CheckpointError
from llmcompressor.modeling.call_graph import model_dtype
from llmcompressor.modeling.weights import embeddings

_WANTED = "Give a model that goes on with a text."
_CHANCE = 1e-3
"""How much of a logit may be due to the order of sums."""
_ROUGHLY = 0.05
"""How much of it, where 16 bits hold it or something is quantized."""
_BY_ALL_TOKENS = 0.3
"""How much of it, where what follows a token decides how it is rounded, to 8 bits at least."""
_WIDE = 8


def load_for_evaluation(
    place: Path, *, trust_remote_code: bool, dtype: torch.dtype | str = "auto"
) -> PreTrainedModel:
    """Load the model of a folder, with the class of its configuration and all weights.

    Args:
        place: the folder.
        trust_remote_code: run modelling code that comes with it.
        dtype: the dtype to compute in; by default that of its configuration.

    Raises:
        CheckpointError: it has no configuration, lacks weights, has codes that the configuration
            says nothing of, or is of a kind that cannot be measured; of what else is wrong
            transformers raises its own errors.
    """
    name = str(place)
    with loading_errors(name):
        config = load_config(name, trust_remote_code=trust_remote_code)
    check_not_encoder_decoder(config, name)
    check_quantization_declared(place)
    with loading_compressed():
        return load_pretrained(name, config, trust_remote_code=trust_remote_code, dtype=dtype)


def check_not_encoder_decoder(config: Any, name: str) -> None:
    """Raise for an encoder-decoder model.

    Raises:
        CheckpointError: it is an encoder with a decoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(
            f"{name} is an encoder with a decoder ({config.model_type}): what it writes depends on "
            "an input beside the text.",
            _WANTED,
        )


def check_causal(model: Module, window: Sequence[int]) -> None:
    """Raise for a model that attends to later tokens.

    Some configurations declare whether their model is bidirectional, others do not, and not all
    that declare it are. So it is tried.

    Args:
        model: a model that returns logits.
        window: at least two token ids.

    Raises:
        CheckpointError: the logits of the first token depend on later tokens.
    """
    config: Any = getattr(model, "config", None)
    first = compute_logits(model, torch.tensor([list(window)]))[0, 0].float()
    share = _rounding_tolerance(model)
    start, *rest = window
    others = [[one] * len(rest) for one in (start, rest[-1], 0 if start else 1)]
    texts = [torch.tensor([[start, *other]]) for other in others if other != rest]
    moved = ((first - compute_logits(model, text)[0, 0].float()).abs().max() for text in texts)
    # a single one may be due to a router that routed the token elsewhere by rounding
    if all(float(move) > share * float(first.abs().max()) for move in moved):
        raise CheckpointError(
            f"{type(model).__name__} ({getattr(config, 'model_type', 'no type')}) reads a text in "
            "both directions: it would see each token that it is to predict.",
            f"{_WANTED[:-1]}; what can be one says so in its config.json (is_decoder: true).",
        )


def _rounding_tolerance(model: Module) -> float:
    """Share of a causal model's logit that rounding may change when later tokens change."""
    schemes = [getattr(module, "quantization_scheme", None) for module in model.modules()]
    sides = ("input_activations", "output_activations")
    held = [getattr(scheme, side, None) for scheme in schemes for side in sides]
    # of dynamic per-tensor arguments: one scale for all tokens of a call
    bits = [
        one.num_bits
        for one in held
        if one is not None and one.dynamic is True and one.strategy == "tensor"
    ]
    if bits:  # with fewer bits a quantization step is as wide as the change looked for
        return _BY_ALL_TOKENS if min(bits) >= _WIDE else math.inf
    is_quantized = any(schemes) or hasattr(getattr(model, "config", None), "quantization_config")
    return _ROUGHLY if is_quantized or model_dtype(model) != torch.float32 else _CHANCE


def compute_logits(model: Module, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """The logits of a model for token ids, ``[B, T, V]``.

    Raises:
        ArgumentError: the model returns something else.
    """
    embedding, _ = embeddings(model)
    parameter = next((embedding if embedding is not None else model).parameters(), None)
    device = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
    inputs: dict[str, Any] = {"input_ids": ids_BT.to(device), "use_cache": False}
    if mask_BT is not None and not mask_BT.all():
        inputs["attention_mask"] = mask_BT.long().to(device)
    logits = getattr(model(**inputs), "logits", None)
    shape = tuple(getattr(logits, "shape", ()))
    if not isinstance(logits, Tensor) or shape[:-1] != ids_BT.shape or shape[-1] <= ids_BT.max():
        raise ArgumentError(
            f"{type(model).__name__} makes {'logits ' + str(list(shape)) if shape else 'no logits'}"
            f" of tokens {list(ids_BT.shape)}: they are no probabilities of the next token.",
            _WANTED,
        )
    return logits
