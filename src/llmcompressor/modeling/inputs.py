# SPDX-License-Identifier: Apache-2.0
"""Model inputs: the entries of a batch that a forward takes, on its device and in its dtype."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

__all__ = ["main_inputs", "model_device", "model_dtype", "model_inputs", "without_cache"]


def model_device(model: Module) -> torch.device:
    """The device for the model's inputs: that of its first loaded parameter."""
    parameter = next((one for one in model.parameters() if not one.is_meta), None)
    return torch.device("cpu") if parameter is None else parameter.device


def model_dtype(model: Module) -> torch.dtype:
    """The dtype of the model's first floating parameter; float32 if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def model_inputs(model: Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a batch that ``model.forward`` takes, on the model's device.

    Labels are left out, as no loss is needed, unless the model derives its decoder inputs from
    them.
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
    """Move a tensor to a device; floating tensors (images, audio) also get the model's dtype."""
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def main_inputs(model: Module) -> frozenset[str]:
    """Names of the model's main inputs, as its class declares them."""
    named = getattr(model, "main_input_name", None) or ()
    return frozenset({named} if isinstance(named, str) else named)


@contextlib.contextmanager
def without_cache(model: Module) -> Iterator[None]:
    """Disable the generation cache of a model, and of models within it, in the body."""
    configs = _cache_configs(model)
    try:
        for config, _ in configs:
            config.use_cache = False
        yield
    finally:
        for config, value in configs:
            config.use_cache = value


def _cache_configs(model: Module) -> list[tuple[Any, bool]]:
    """Every configuration in the model that has a ``use_cache``, with its value."""
    found: dict[int, tuple[Any, bool]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and isinstance(getattr(config, "use_cache", None), bool):
            found.setdefault(id(config), (config, config.use_cache))
    return list(found.values())
