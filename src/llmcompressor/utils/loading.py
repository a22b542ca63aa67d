# SPDX-License-Identifier: Apache-2.0
"""A context in which ``from_pretrained`` loads a model the way compressing wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    PreTrainedModel,
)

__all__ = ["load_context"]

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

    def load(cls: Any, name: Any, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """``from_pretrained`` with the arguments that compressing wants."""
        return original(name, *args, **_for_compression(name, kwargs))

    model_cls.from_pretrained = classmethod(load)
    try:
        yield
    finally:
        if found is None:
            del model_cls.from_pretrained
        else:
            model_cls.from_pretrained = found


def _for_compression(name: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with what is missing filled in; what was given stays."""
    arguments = dict(given)
    if "torch_dtype" not in arguments:
        arguments.setdefault("dtype", "auto")
    if arguments.get("device_map") in _OFFLOADED:
        del arguments["device_map"]
    if "quantization_config" not in arguments and _is_compressed(name, arguments):
        arguments["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    return arguments


def _is_compressed(name: Any, arguments: dict[str, Any]) -> bool:
    config = arguments.get("config")
    if not hasattr(config, "to_dict"):
        known = ("cache_dir", "revision", "subfolder", "token", "trust_remote_code")
        hub = {key: arguments[key] for key in known if key in arguments}
        config = AutoConfig.from_pretrained(config or name, **hub)
    quantization = getattr(config, "quantization_config", None) or {}
    return dict(quantization).get("quant_method") == "compressed-tensors"
