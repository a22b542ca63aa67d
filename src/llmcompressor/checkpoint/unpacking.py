# SPDX-License-Identifier: Apache-2.0
"""Decompression of models in the compressed-tensors format while they are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import CompressedTensorsConfig, PreTrainedModel

from llmcompressor.checkpoint.layout import loaded_names
from llmcompressor.checkpoint.packed_zero_points import packed_zero_points_fit

__all__ = ["load_unpacked", "lost_codes", "unpack"]

_SCALE = "weight_scale"


def load_unpacked(load: Callable[..., Any], settings: Mapping[str, Any], **arguments: Any) -> Any:
    """Load a compressed model and decompress its weights, each by its own module's scheme.

    Args:
        load: a ``from_pretrained``.
        settings: the ``quantization_config`` of the model.
        arguments: arguments for ``load``.

    Returns:
        The result of ``load``. The modules keep their schemes.
    """
    # Since transformers 5.21 a single scheme is used to decompress all modules. That also handles
    # models that cannot be loaded packed, as where a class's initialization accesses a weight.
    if is_simple := _has_one_group(settings):
        arguments["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with packed_zero_points_fit(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        loaded = load(**arguments)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if not is_simple:
        unpack(model)
    return loaded


def unpack(model: PreTrainedModel) -> None:
    """Decompress the weights of a model that was loaded packed; its modules keep their schemes."""
    quantizer: Any = model.hf_quantizer
    if quantizer.quantization_config.is_quantization_compressed:  # else it was written dense
        quantizer.compressor.decompress_model(model)
    quantizer.remove_quantization_config(model)


def lost_codes(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the code tensors whose scheme the model lost, as those of fused experts.

    Args:
        model: the result of :func:`load_unpacked`.
        names: names of tensors that hold codes.
    """
    scales = {name: f"{name.rpartition('.')[0]}.{_SCALE}" for name in names}
    found = loaded_names(model, scales.values(), model.state_dict())
    lost = []
    for name, scale in scales.items():
        own = found.get(scale)
        module = None if own is None else model.get_submodule(own.target.rpartition(".")[0])
        if own is None or own.merged or not hasattr(module, "quantization_scheme"):
            lost.append(name)
    return lost


def _has_one_group(settings: Mapping[str, Any]) -> bool:
    groups = dict(settings.get("config_groups") or {}).values()
    return len([one for one in groups if dict(one).get("weights")]) <= 1
