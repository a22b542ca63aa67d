# SPDX-License-Identifier: Apache-2.0
"""Whether transformers makes stacks of experts that are plain, in a model that is quantized.

It then looks for the scale of each expert's weight as well (where the group that it takes for
experts is of 8-bit floats), and most of its operations stack what is there. Some insist on all that
they look for. So the operations are run here, on tensors without data.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["stacks_plain_experts"]

_EACH = 2
"""Stand-ins for the experts of each stack."""


def stacks_plain_experts(model: Any, name: str) -> bool:
    """Whether what makes a stack of a tensor does so without scales.

    Args:
        model: without data.
        name: of one expert's weight in the file.
    """
    from transformers.conversion_mapping import (  # noqa: PLC0415  # loads much
        get_model_conversion_mapping,
    )
    from transformers.core_model_loading import (  # noqa: PLC0415
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    every: list[Any] = get_model_conversion_mapping(model)
    renamings = [one for one in every if isinstance(one, WeightRenaming)]
    converters: list[Any] = [one for one in every if isinstance(one, WeightConverter)]
    target, pattern = rename_source_key(name, renamings, converters)
    found = next((one for one in converters if pattern in one.source_patterns), None)
    return found is None or _runs(found, model, str(target))


def _runs(converter: Any, model: Any, target: str) -> bool:
    weights = [pattern for pattern in converter.source_patterns if pattern.endswith(".weight")]
    others = [pattern for pattern in converter.source_patterns if pattern not in weights]
    count = _EACH * len(converter.target_patterns)
    expert = torch.empty(_EACH, _EACH, device="meta")
    tensors: Any = {f"{pattern}$": [expert] * count for pattern in weights}
    sources = [*tensors, *(f"{pattern}_scale$" for pattern in weights), *others]
    try:
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=sources,
                target_patterns=converter.target_patterns,
                full_layer_name=target,
                model=model,
                config=model.config,
            )
    except Exception:  # an operation of any kind, and what it refuses is the question
        return False
    return True
