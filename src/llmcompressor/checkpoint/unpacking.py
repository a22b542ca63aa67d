# SPDX-License-Identifier: Apache-2.0
"""Weights of a model that is quantized in the format of compressed-tensors, as numbers again."""

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
    """Load a model whose weights are numbers, each by the scheme of its own module.

    Args:
        load: a ``from_pretrained``.
        settings: the ``quantization_config`` of what it loads.
        arguments: for ``load``.

    Returns:
        What ``load`` returns. The modules keep their schemes.
    """
    # Since transformers 5.21 one scheme is taken to unpack all. It also unpacks what cannot be
    # loaded packed, as where a class's initialization names a weight.
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
    """Give a model that was loaded packed its weights; its modules keep their schemes."""
    quantizer: Any = model.hf_quantizer
    if quantizer.quantization_config.is_quantization_compressed:  # else it was written dense
        quantizer.compressor.decompress_model(model)
    quantizer.remove_quantization_config(model)


def lost_codes(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's codes that are plain weights in the model, as of joined experts.

    Args:
        model: as :func:`load_unpacked` gives it.
        names: tensors that hold codes.
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
