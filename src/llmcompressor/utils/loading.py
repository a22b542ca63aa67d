# SPDX-License-Identifier: Apache-2.0
"""A context in which ``from_pretrained`` loads a model the way compressing wants it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from compressed_tensors.offload import remove_dispatch
from compressed_tensors.quantization import QuantizationMetadata
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from llmcompressor.checkpoint.source import check_format, says_nothing
from llmcompressor.checkpoint.unpacking import load_unpacked

__all__ = ["is_model_ct_quantized_from_path", "load_context"]

# What scripts ask for so that weights wait outside the accelerator: here that is the default.
_OFFLOADED = frozenset({"auto_offload", "auto", "cpu"})


@contextmanager
def load_context(model_cls: Any = AutoModelForCausalLM) -> Iterator[None]:
    """Inside, ``model_cls.from_pretrained`` loads for compression.

    The weights keep the dtype of the file unless another is asked for, stay in the processor's
    memory (blocks visit the accelerator one at a time later), and are dequantized if they were
    compressed before::

        with load_context():
            model = AutoModelForCausalLM.from_pretrained("path/or/name")

    Args:
        model_cls: the class whose ``from_pretrained`` will be called.
    """
    found = vars(model_cls).get("from_pretrained")
    original: Callable[..., PreTrainedModel] = model_cls.from_pretrained

    def load(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        """``from_pretrained`` with the arguments that compressing wants."""
        arguments = _for_compression(kwargs)
        settings = {}
        if "quantization_config" not in arguments:
            config = _config(name, arguments)
            settings = _settings(config)
            check_format(str(name), settings)
            if hasattr(config, "quantization_config") and says_nothing(settings):
                del config.quantization_config
                arguments["config"], settings = config, {}
        if settings.get("quant_method") != "compressed-tensors":
            return original(name, *args, **arguments)
        loaded = load_unpacked(partial(original, name, *args), settings, **arguments)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        _forget_schemes(model)
        if "device_map" not in arguments:
            remove_dispatch(model, onload_tensors=True)  # unpacking leaves them with its own caches
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
    """Whether a checkpoint is quantized in the format of compressed-tensors.

    Args:
        path: name or folder of the model; only its configuration is read.
    """
    return _settings(_config(path, {})).get("quant_method") == "compressed-tensors"


def _for_compression(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with what is missing filled in; what was given stays."""
    arguments = dict(given)
    if "torch_dtype" not in arguments:
        arguments.setdefault("dtype", "auto")
    if arguments.get("device_map") in _OFFLOADED:
        del arguments["device_map"]
    return arguments


def _forget_schemes(model: PreTrainedModel) -> None:
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            QuantizationMetadata.clear_quantization(module)
            vars(module).pop("quantization_status", None)


def _config(name: Any, arguments: dict[str, Any]) -> Any:
    """The configuration of what is loaded; one that is given is left as it is."""
    config = arguments.get("config")
    if hasattr(config, "to_dict"):
        return copy.deepcopy(config)
    known = ("cache_dir", "revision", "subfolder", "token", "trust_remote_code")
    hub = {key: arguments[key] for key in known if key in arguments}
    return AutoConfig.from_pretrained(config or name, **hub)


def _settings(config: Any) -> dict[str, Any]:
    """How what is loaded is quantized, empty if it is not."""
    found = getattr(config, "quantization_config", None) or {}
    return dict(found if isinstance(found, dict) else found.to_dict())
