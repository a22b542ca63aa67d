# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of a family call the matrices of an expert, from transformers' own tables.

Where transformers makes a stack of tensors that a checkpoint holds expert by expert, its table has
their patterns: ``.experts.*.w1.weight`` and ``.experts.*.w3.weight`` become
``.experts.gate_up_proj``. Where there is no table, checkpoints hold stacks; servers then take the
names ``gate_proj``, ``up_proj`` and ``down_proj``.
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
    """The entries of a model's table that make stacks of tensors, one per expert."""
    found: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return [
        entry
        for entry in found
        if isinstance(entry, WeightConverter) and type(entry.operations[0]) is MergeModulelist
    ]


def part_names(mixture: Mixture, converters: list[WeightConverter]) -> dict[str, str]:
    """What the Linears of one mixture are called, by what they do.

    Args:
        mixture: one that can be taken apart.
        converters: as of :func:`stacking_converters`.
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
    """Whether transformers reads the quantized experts of a mixture one by one."""
    assert mixture.form is not None
    if type(mixture.module).__name__ in MODULES_TO_PATCH_FOR_QUANTIZATION:
        return True
    stack = f"{mixture.name}.{mixture.form.parts[0].stack}"
    return any(_sources(converter, stack) for converter in converters)


def is_made_otherwise(mixture: Mixture, model: PreTrainedModel) -> bool:
    """Whether a stack is made of tensors of single experts, but they are not its experts in order.

    Then the number of an expert in the checkpoint is not the one that it has in the model.
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
    """The last names of what a converter makes the tensor ``target`` of; empty if it does not."""
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
    """Whether a converter is for the part of the model that a tensor is in.

    The parts of a composite model (its language model, its tower of images) have tables of their
    own, and both may have experts.
    """
    scope, base = converter.scope_prefix, converter.base_model_prefix
    return not scope or target.startswith((f"{scope}.", f"{base}.{scope}."))
