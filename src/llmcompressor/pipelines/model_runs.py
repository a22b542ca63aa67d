# SPDX-License-Identifier: Apache-2.0
"""How a model is run on calibration batches: which arguments, in which mode, on which device."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.quantized_mark import marked_quantized

__all__ = [
    "calibration_mode",
    "model_device",
    "model_dtype",
    "model_inputs",
    "small_batch",
    "token_mask",
]

_TEXT_KEYS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"})
_PROBE_TOKENS = 8


@contextlib.contextmanager
def calibration_mode(model: Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no generation cache, fake quantization off; restored after.

    The forward is that of a quantized model, which some models run in another way.

    Modules that an earlier modifier has quantized run on the weights it left, and their
    activations are not rounded: what is measured is the error of the weights alone.
    """
    training = [(module, module.training) for module in model.modules()]
    configs = _cache_configs(model)
    quantized = [module for module in model.modules() if hasattr(module, "quantization_scheme")]
    enabled = [module.__dict__.get("quantization_enabled") for module in quantized]
    try:
        model.eval()
        for config, _ in configs:
            config.use_cache = False
        for module in quantized:
            module.quantization_enabled = False  # type: ignore[assignment]
        with torch.no_grad(), marked_quantized(model):
            yield
    finally:
        for module, was_training in training:
            module.training = was_training
        for config, value in configs:
            config.use_cache = value
        for module, was_enabled in zip(quantized, enabled, strict=True):
            if was_enabled is None:
                module.__dict__.pop("quantization_enabled", None)
            else:
                module.quantization_enabled = was_enabled


def _cache_configs(model: Module) -> list[tuple[Any, bool]]:
    """Every configuration in the model that has a ``use_cache``, with its value."""
    found: dict[int, tuple[Any, bool]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and isinstance(getattr(config, "use_cache", None), bool):
            found.setdefault(id(config), (config, config.use_cache))
    return list(found.values())


def model_device(model: Module) -> torch.device:
    """Where the model's inputs belong: the device of its first parameter that is loaded."""
    parameter = next((one for one in model.parameters() if not one.is_meta), None)
    return torch.device("cpu") if parameter is None else parameter.device


def model_dtype(model: Module) -> torch.dtype:
    """The dtype of the model's first floating parameter; float32 if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def model_inputs(model: Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a batch that ``model.forward`` takes, on the model's device.

    Labels are left out, because the loss is not wanted, unless the model makes its decoder's
    inputs of them.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    device = model_device(model)
    dtype = model_dtype(model)
    inputs = {}
    for key, value in batch.items():
        if key not in parameters and not (takes_all and key not in ("loss_mask", "text", "prompt")):
            continue
        inputs[key] = _placed(value, device, dtype) if isinstance(value, Tensor) else value
    if "decoder_input_ids" in inputs or "decoder_input_ids" not in parameters:
        inputs.pop("labels", None)
    return inputs


def _placed(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Token ids and masks keep their dtype; images and sound get the model's."""
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def token_mask(batch: Mapping[str, Any], key: str = "attention_mask") -> Tensor | None:
    """Bool ``[batch, tokens]``, true where a real token is; ``None`` where all are."""
    mask = batch.get(key)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    real = mask.bool()
    return None if bool(real.all()) else real


def small_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A cut of a text batch, enough to see what calls what; other batches as they are."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    if set(tensors) != set(batch) or not set(batch) <= _TEXT_KEYS:
        return dict(batch)
    if "input_ids" not in batch:
        return dict(batch)
    shape = batch["input_ids"].shape
    return {
        key: value[:1, :_PROBE_TOKENS] if value.shape == shape else value
        for key, value in batch.items()
    }
