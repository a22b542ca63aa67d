# SPDX-License-Identifier: Apache-2.0
"""Whether the tables of transformers stack experts where a model is quantized, found by trying.

Where anything is, transformers puts codes, scales or both on the list of what each stack of experts
is made of, unpacks them first, and hands the list on. Most of what follows takes the tensors that
are there; some insists on all of the list, and fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from llmcompressor.verification.class_model import class_model

__all__ = ["stacks_quantized"]

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
