# SPDX-License-Identifier: Apache-2.0
"""Whether the tables of transformers still work where a model is quantized, found by trying.

Where anything is, transformers puts codes, scales or both on the list of what each stack of experts
is made of, unpacks them first, and hands the list on. Most of what follows takes the tensors that
are there; some insists on all of the list, and fails.

Since 5.21 it does so with every table of weights. One that splits a weight cannot be built then,
and no tensor is loaded. One that joins weights unpacks them as it unpacks experts: of those that
are plain nothing is left, unless the group that is taken for experts is of 8-bit floats.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmcompressor.verification.class_model import class_model
from llmcompressor.verification.config_changes import quiet_transformers

__all__ = ["Tables", "stacks_quantized", "tables_quantized"]

_EXPERTS, _SIZE = 4, 4


def stacks_quantized(config: Mapping[str, Any]) -> bool:
    """Whether experts get into their stacks where anything is quantized.

    Args:
        config: the content of ``config.json``.

    Returns:
        Whether each table that stacks experts does so beside names of scales too; ``True`` where
        the class cannot be built, and where a table does not run on tensors of any size.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.core_model_loading import WeightConverter  # noqa: PLC0415

    model = class_model(config)
    if model is None:
        return True
    for one in get_model_conversion_mapping(model):
        if not isinstance(one, WeightConverter):
            continue
        sources = list(one.source_patterns)
        weights = [source for source in sources if source.endswith(".weight")]
        if not weights or any("experts" not in source for source in sources):
            continue
        others = [source for source in sources if source not in weights]
        if not _runs(one, [*weights, *others], [], model):
            continue
        scales = [f"{weight}_scale$" for weight in weights]
        if not _runs(one, [f"{weight}$" for weight in weights] + others, scales, model):
            return False
    return True


@dataclass(frozen=True)
class Tables:
    """The tables of a class where its model is quantized as a configuration says.

    Attributes:
        are_built: whether there are any; nothing can be loaded without.
        lose: of the name of a plain tensor in the file, whether a table makes nothing of it.
    """

    are_built: bool
    lose: Callable[[str], bool]


def tables_quantized(config: Mapping[str, Any]) -> Tables | None:
    """What becomes of the tables of a class where its model is quantized.

    Args:
        config: the content of ``config.json``, with its ``quantization_config``.

    Returns:
        ``None`` where the class or the quantization cannot be built.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.core_model_loading import (  # noqa: PLC0415
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    model, quantizer = class_model(config), _quantizer(config)
    if model is None or quantizer is None:
        return None
    try:
        every: list[Any] = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    except ValueError:  # to prepare a large model takes long, and matters to these alone
        ready = _prepared(model, quantizer)
        try:
            every = get_model_conversion_mapping(ready, hf_quantizer=quantizer)
        except ValueError:
            return Tables(are_built=False, lose=lambda name: False)
    renamings = [one for one in every if isinstance(one, WeightRenaming)]
    converters = [one for one in every if isinstance(one, WeightConverter)]
    plain = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightConverter)]
    losing = {
        pattern for one in converters if _loses(one, model) for pattern in one.source_patterns
    }
    own, prefix = dict(model.state_dict()), model.base_model_prefix

    def lose(name: str) -> bool:
        usual, found = (
            rename_source_key(name, renamings, each, prefix, own)[1] for each in (plain, converters)
        )
        is_left = found is None and usual is not None  # its table asks for codes alone
        return found in losing or (is_left and "experts" not in str(usual))

    return Tables(are_built=True, lose=lose)


def _prepared(model: Any, quantizer: Any) -> Any:
    """The model with parameters for codes and scales, as transformers asks for its tables.

    A table that splits a weight then splits each of them, where all parts have them. As it is
    where it cannot be prepared: other rules speak of that.
    """
    ready = copy.deepcopy(model)
    try:
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # bars of progress
            quantizer.preprocess_model(model=ready)
    except Exception:  # a class of any kind
        return model
    return ready


def _quantizer(config: Mapping[str, Any]) -> Any:
    from transformers import CompressedTensorsConfig  # noqa: PLC0415  # loads much
    from transformers.quantizers.quantizer_compressed_tensors import (  # noqa: PLC0415
        CompressedTensorsHfQuantizer,
    )

    try:
        with quiet_transformers():
            kind: Any = CompressedTensorsConfig
            settings = kind.from_dict(dict(config["quantization_config"]))
            found: Any = CompressedTensorsHfQuantizer(settings, pre_quantized=True)
    except Exception:  # other rules speak of what is wrong with it
        return None
    found.use_fp8_kernel = False
    return found


def _loses(converter: Any, model: Any) -> bool:
    """Whether a table of other weights than experts unpacks first, and has no plain weight left."""
    sources = [one for one in converter.source_patterns if one.endswith((".weight", ".weight$"))]
    unpacking = [one for one in converter.operations if hasattr(one, "hf_quantizer")]
    if not unpacking or not sources or any("experts" in source for source in sources):
        return False
    try:
        found = unpacking[0].convert(
            {source: [torch.zeros(_SIZE, _SIZE)] for source in sources},
            source_patterns=list(converter.source_patterns),
            target_patterns=list(converter.target_patterns),
            full_layer_name=next(name for name, _ in model.named_parameters()),
            model=model,
            config=model.config,
        )
    except Exception:  # an operation of any kind
        return True
    return not set(sources) <= set(found)


def _runs(converter: Any, given: Sequence[str], absent: Sequence[str], model: Any) -> bool:
    """Whether a table takes small tensors for what is given, where more is on its list."""
    tensors: Any = {name: [torch.zeros(_SIZE, _SIZE)] * _EXPERTS for name in given}
    try:
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=[*given, *absent],
                target_patterns=list(converter.target_patterns),
                full_layer_name="experts",
                model=model,
                config=model.config,
                missing_keys=None,
            )
    except Exception:  # an operation of any kind
        return False
    return True
