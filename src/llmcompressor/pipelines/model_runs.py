# SPDX-License-Identifier: Apache-2.0
"""Calibration mode of a model, and small batches for dry runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.inputs import without_cache
from llmcompressor.modeling.modes import evaluating, unrounded
from llmcompressor.modeling.quantized_mark import marked_quantized

__all__ = [
    "calibration_mode",
    "small_batch",
]

_TEXT_KEYS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "loss_mask"}
)
_PROBE_TOKENS = 8


@contextlib.contextmanager
def calibration_mode(model: Module) -> Iterator[None]:
    """Set evaluation mode, no gradients, no cache and no fake quantization while the body runs.

    The model is marked as quantized, as some models run another forward then.

    Modules that an earlier modifier has quantized run with its weights, but their activations
    are not quantized, so that only the error of the weights is measured.
    """
    with (
        evaluating(model),
        unrounded(model),
        torch.no_grad(),
        without_cache(model),
        marked_quantized(model),
    ):
        yield


def small_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small slice of a text batch for dry runs; other batches are returned whole."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    if set(tensors) != set(batch) or not set(batch) <= _TEXT_KEYS:
        return dict(batch)
    if "input_ids" not in batch:
        return dict(batch)
    shape = batch["input_ids"].shape
    if any(value.shape != shape for value in tensors.values()):  # masks of four dimensions
        return dict(batch)
    return {key: value[:1, :_PROBE_TOKENS] for key, value in batch.items()}
