# SPDX-License-Identifier: Apache-2.0
"""Names of expert matrices in the checkpoints of a family, from transformers' own tables.

Where transformers stacks tensors that a checkpoint stores per expert, its table has their patterns:
``.experts.*.w1.weight`` and ``.experts.*.w3.weight`` become ``.experts.gate_up_proj``. Without a
table, checkpoints store stacks; servers then accept the names ``gate_proj``, ``up_proj`` and
``down_proj``.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

from llmcompressor.modeling.expert_forms import Mixture

__all__ = ["is_made_otherwise", "is_read_singly", "part_names", "stacking_converters"]

_PER_EXPERT = re.compile(r"\*\\?\.(\w+)\\?\.weight\$?$")


def stacking_converters(model: PreTrainedModel) -> list[WeightConverter]:
    """Return the model's weight converters that stack tensors of single experts."""
    found: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return [
        entry
        for entry in found
        if isinstance(entry, WeightConverter) and type(entry.operations[0]) is MergeModulelist
    ]


def part_names(mixture: Mixture, converters: list[WeightConverter]) -> dict[str, str]:
    """Return the checkpoint names of the Linears of an MoE, by role.

    Args:
        mixture: an MoE that can be unfused.
        converters: the result of :func:`stacking_converters`.
    """
    assert mixture.form is not None
    names = {part.role: part.role for part in mixture.form.parts}
    for stack in dict.fromkeys(part.stack for part in mixture.form.parts):
        roles = [part.role for part in mixture.form.parts if part.stack == stack]
        for converter in converters:
            sources = _sources(converter, f"{mixture.name}.{stack}")
            if len(sources) == len(roles):
                names |= dict(zip(roles, sources, strict=True))
    return names


def is_read_singly(mixture: Mixture, converters: list[WeightConverter]) -> bool:
    """Return True if transformers loads the quantized experts of an MoE one by one."""
    assert mixture.form is not None
    if type(mixture.module).__name__ in MODULES_TO_PATCH_FOR_QUANTIZATION:
        return True
    stack = f"{mixture.name}.{mixture.form.parts[0].stack}"
    return any(_sources(converter, stack) for converter in converters)


def is_made_otherwise(mixture: Mixture, model: PreTrainedModel) -> bool:
    """Return True if a stack is built from single experts, but not in the order of its experts.

    An expert's number in the checkpoint then differs from its number in the model.
    """
    assert mixture.form is not None
    stacks = {f"{mixture.name}.{part.stack}" for part in mixture.form.parts}
    found: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return any(
        not _only_stacks(entry) and any(_sources(entry, stack) for stack in stacks)
        for entry in found
        if isinstance(entry, WeightConverter)
    )


def _only_stacks(converter: WeightConverter) -> bool:
    first, *rest = converter.operations
    return type(first) is MergeModulelist and all(isinstance(one, Concatenate) for one in rest)


def _sources(converter: Any, target: str) -> list[str]:
    """Return the names that a converter builds ``target`` from; empty for another target."""
    if not _reaches(converter, target):
        return []
    patterns = [
        str(one).replace("\\", "").rstrip("$") for one in converter._original_target_patterns
    ]
    if not any(target.endswith(pattern.lstrip("^")) for pattern in patterns):
        return []
    found = [_PER_EXPERT.search(str(one)) for one in converter._original_source_patterns]
    return [one.group(1) for one in found if one is not None]


def _reaches(converter: Any, target: str) -> bool:
    """Return True if a converter's scope includes a tensor.

    The parts of a composite model (language model, vision tower) have tables of their own, and both
    may have experts.
    """
    scope, base = converter.scope_prefix, converter.base_model_prefix
    return not scope or target.startswith((f"{scope}.", f"{base}.{scope}."))
