# SPDX-License-Identifier: Apache-2.0
"""A context in which ``from_pretrained`` loads a model for compression."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from compressed_tensors.offload import remove_dispatch
from compressed_tensors.quantization import QuantizationMetadata
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.initialization import TORCH_INIT_FUNCTIONS

from llmcompressor.checkpoint.load import load_decompressed
from llmcompressor.checkpoint.source import check_format, is_empty_quantization
from llmcompressor.transformers_internals import build_from_config, name_config
from llmcompressor.utils.devices import best_device

__all__ = [
    "get_high_precision",
    "is_model_ct_quantized_from_path",
    "load_context",
    "patch_transformers_logger_level",
    "skip_weights_download",
    "skip_weights_initialize",
]

# Device maps by which scripts keep weights off the accelerator: here that is the default.
_OFFLOADED = frozenset({"auto_offload", "auto", "cpu"})


@contextmanager
def load_context(model_cls: Any = AutoModelForCausalLM) -> Iterator[None]:
    """Make ``model_cls.from_pretrained`` load models for compression inside.

    The weights keep the dtype of the file unless another is requested, stay in main memory (blocks
    are moved to the accelerator one at a time later), and are dequantized if they were compressed
    before::

        with load_context():
            model = AutoModelForCausalLM.from_pretrained("path/or/name")

    Args:
        model_cls: the class whose ``from_pretrained`` will be called.
    """
    found = vars(model_cls).get("from_pretrained")
    original: Callable[..., PreTrainedModel] = model_cls.from_pretrained

    def load(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``from_pretrained`` with the arguments for compression."""
        arguments = _for_compression(kwargs)
        settings = {}
        if "quantization_config" not in arguments:
            config = _config(name, arguments)
            settings = _settings(config)
            check_format(str(name), settings)
            if hasattr(config, "quantization_config") and is_empty_quantization(settings):
                del config.quantization_config
                arguments["config"], settings = config, {}
        if settings.get("quant_method") != "compressed-tensors":
            return original(name, *args, **arguments)
        loaded = load_decompressed(partial(original, name, *args), settings, **arguments)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        _remove_schemes(model)
        if "device_map" not in arguments:
            remove_dispatch(model, onload_tensors=True)  # from the caches of decompression
        return loaded

    model_cls.from_pretrained = classmethod(load)
    try:
        yield
    finally:
        if found is None:
            del model_cls.from_pretrained
        else:
            model_cls.from_pretrained = found


def is_model_ct_quantized_from_path(path: str) -> bool:
    """Return True if a checkpoint is quantized in the format of compressed-tensors.

    Args:
        path: name or folder of the model; only its configuration is loaded.
    """
    return _settings(_config(path, {})).get("quant_method") == "compressed-tensors"


def _for_compression(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with defaults for compression; given arguments are kept."""
    arguments = dict(given)
    if "torch_dtype" not in arguments:
        arguments.setdefault("dtype", "auto")
    if arguments.get("device_map") in _OFFLOADED:
        del arguments["device_map"]
    return arguments


def _remove_schemes(model: PreTrainedModel) -> None:
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            QuantizationMetadata.clear_quantization(module)
            vars(module).pop("quantization_status", None)


def _config(name: Any, arguments: dict[str, Any]) -> Any:
    """Return the configuration of the model to load; a given one is copied."""
    config = arguments.get("config")
    if hasattr(config, "to_dict"):
        return copy.deepcopy(config)
    known = ("cache_dir", "revision", "subfolder", "token", "trust_remote_code")
    hub = {key: arguments[key] for key in known if key in arguments}
    return AutoConfig.from_pretrained(config or name, **hub)


def _settings(config: Any) -> dict[str, Any]:
    """Return the quantization configuration as a dict; empty if there is none."""
    found = getattr(config, "quantization_config", None) or {}
    return dict(found if isinstance(found, dict) else found.to_dict())


# --------------------
# Models without weights, to try a script or a recipe before the weights are downloaded.

_OF_BUILDING = ("attn_implementation", "experts_implementation", "trust_remote_code")
_OF_HUB = ("cache_dir", "revision", "subfolder", "token", "trust_remote_code")


@contextmanager
def skip_weights_download(model_class: Any = AutoModelForCausalLM) -> Iterator[None]:
    """Make ``model_class.from_pretrained`` build a model with random weights inside.

    Args:
        model_class: the class whose ``from_pretrained`` will be called.
    """
    found = vars(model_class).get("from_pretrained")

    def build(cls: Any, name: Any, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """Return a model with the configuration of ``name``."""
        hub = {key: kwargs[key] for key in _OF_HUB if key in kwargs}
        config = kwargs.get("config") or AutoConfig.from_pretrained(name, **hub)
        given = {key: kwargs[key] for key in _OF_BUILDING if key in kwargs}
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype", "auto"))
        given["dtype"] = config.dtype if dtype in ("auto", None) else dtype
        model: PreTrainedModel = build_from_config(cls, config, **given)
        model.name_or_path = str(name)
        name_config(model.config, str(name))
        torch.nn.Module.eval(model)
        return model

    model_class.from_pretrained = classmethod(build)
    try:
        yield
    finally:
        if found is None:
            del model_class.from_pretrained
        else:
            model_class.from_pretrained = found


@contextmanager
def skip_weights_initialize(use_zeros: bool = False) -> Iterator[None]:
    """Disable torch's weight initialization functions inside.

    Args:
        use_zeros: fill tensors with zeros instead of leaving them unchanged.
    """

    def skip(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor.fill_(0) if use_zeros else tensor

    with ExitStack() as stack, torch.no_grad():
        for name in TORCH_INIT_FUNCTIONS:
            stack.enter_context(patch.object(torch.nn.init, name, skip))
        yield


@contextmanager
def patch_transformers_logger_level(level: int = logging.ERROR) -> Iterator[None]:
    """Set the log level of transformers' model loading inside."""
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def get_high_precision() -> torch.dtype:
    """Return the widest float dtype of :func:`~llmcompressor.utils.devices.best_device`."""
    return torch.float32 if best_device().type == "mps" else torch.float64
