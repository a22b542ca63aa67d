# SPDX-License-Identifier: Apache-2.0
"""MoE modules that a recipe targets, whose experts have to be unfused into Linears."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch.nn import Linear, Module
from transformers import PreTrainedModel

from llmcompressor.checkpoint.names import (
    expert_linear_names,
    has_reordered_experts,
    loads_experts_one_by_one,
    stacking_converters,
)
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.matching import as_targets, matches
from llmcompressor.modeling.names import named_modules, own_parameters
from llmcompressor.moe.layouts import DOWN, GATE, UP, StackedMoE, is_stack
from llmcompressor.moe.linear_experts import find_stacked_moes
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.runtime.progress import join_names


def targeted_moes(model: Module, modifiers: Sequence[Modifier]) -> list[StackedMoE]:
    """MoE modules whose experts are targeted by a modifier, once they are unfused into Linears.

    A module that is ignored by its own name or class is left out.

    Args:
        model: its weights may be on the meta device.
        modifiers: of the recipe.

    Raises:
        TargetError: a targeted module cannot be unfused, so its experts would silently stay
            uncompressed.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    mixtures = find_stacked_moes(model)
    if not mixtures:
        return []
    converters = stacking_converters(model)
    meant: list[StackedMoE] = []
    for mixture in mixtures:
        roles = {role: role for role in (GATE, UP, DOWN)}
        names = expert_linear_names(mixture, converters) if mixture.form is not None else roles
        holders = _ancestors(model, mixture.name)
        by = [one for one in modifiers if _is_targeted(mixture, names, holders, one)]
        # a modifier without an ignore list reports by itself that it cannot compress a stack
        can_ignore = any("ignore" in type(one).model_fields for one in by)
        if can_ignore or (
            by
            and mixture.form is not None
            and not has_reordered_experts(mixture, model)
            and not _modules_sharing_stacks([mixture], model)
        ):
            meant.append(mixture)
    if meant:
        _check_can_unfuse(meant, model)
    return meant


def _check_can_unfuse(meant: Sequence[StackedMoE], model: PreTrainedModel) -> None:
    """Refuse MoE modules whose experts cannot be unfused, or not saved correctly once unfused."""
    unseen = [mixture for mixture in meant if mixture.form is None]
    if unseen:
        raise TargetError(
            f"The experts of {join_names(one.name for one in unseen)} cannot be taken apart: "
            f"{unseen[0].problem}. The recipe's targets mean them, and they would stay as they "
            "are.",
            f"Ignore them: {ignore_suggestion(unseen)}.",
        )
    mixed = [mixture for mixture in meant if has_reordered_experts(mixture, model)]
    if mixed:
        raise TargetError(
            f"The experts of {join_names(one.name for one in mixed)} have other numbers in a "
            f"checkpoint of {type(model).__name__}, where several mixtures share one list: what "
            "is written of them one by one, no reader would find.",
            f"Ignore them: {ignore_suggestion(mixed)}.",
        )
    tied = _modules_sharing_stacks(meant, model)
    if tied:
        raise TargetError(
            f"{join_names(tied)} share their stacks of experts, so none of them can be quantized.",
            f"Ignore them: {ignore_suggestion(meant)}.",
        )


def _modules_sharing_stacks(meant: Sequence[StackedMoE], model: PreTrainedModel) -> list[str]:
    """Names of modules that share stacked parameters with one of the targeted MoE modules."""
    owners: dict[int, list[str]] = {}
    for name, module in named_modules(model):
        for parameter in own_parameters(module):
            owners.setdefault(id(parameter), []).append(name)
    stacks = (parameter for mixture in meant for parameter in own_parameters(mixture.module))
    sets = (owners[id(parameter)] for parameter in stacks)
    return list(dict.fromkeys(name for names in sets if len(names) > 1 for name in names))


def warn_unloadable_experts(model: PreTrainedModel, mixtures: Sequence[StackedMoE]) -> None:
    """Warn about MoE modules whose quantized experts transformers cannot load."""
    converters = stacking_converters(model) if mixtures else []
    unread = [one.name for one in mixtures if not loads_experts_one_by_one(one, converters)]
    if unread:
        logger.warning(
            f"Each expert of {join_names(unread)} is written by itself, as servers read quantized "
            "experts. transformers has no table for them: it looks for their stacks."
        )


def unquantized_moes(
    mixtures: Sequence[StackedMoE], model: Module, modifiers: Sequence[Modifier]
) -> set[str]:
    """Names of the MoE modules that no modifier quantizes."""
    quantizing = [one for one in modifiers if isinstance(one, QuantizationMixin)]
    quantized = {one.name for one in targeted_moes(model, quantizing)}
    return {one.name for one in mixtures} - quantized


def _ancestors(model: Module, name: str) -> dict[str, Module]:
    """Map names to the ancestors of an MoE module and a placeholder for the module itself."""
    parts = name.split(".")
    names = [".".join(parts[:end]) for end in range(len(parts))]
    return {**{each: model.get_submodule(each) for each in names}, name: Module()}


def _is_targeted(
    mixture: StackedMoE,
    names: Mapping[str, str],
    holders: Mapping[str, Module],
    modifier: Modifier,
) -> bool:
    stand_in = Linear(1, 1, bias=False, device="meta")
    whole = [mixture.name, *(f"{mixture.name}.{stack}" for stack in mixture.module._parameters)]
    for entry in as_targets(getattr(modifier, "ignore", None)):
        if any(matches(name, mixture.module, entry) for name in whole):
            return False
    return any(
        modifier.means(name, stand_in, holders) for name in _unfused_linear_names(mixture, names)
    )


def _unfused_linear_names(mixture: StackedMoE, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of the experts' Linears after unfusing; of one expert without a stack."""
    parameters = mixture.module._parameters
    stack = next((one for one in parameters.values() if is_stack(one)), None)
    for number in range(1 if stack is None else stack.shape[0]):
        for own in names.values():
            yield f"{mixture.name}.{number}.{own}"
    if mixture.form is None:
        yield from (f"{mixture.name}.{name}" for name in parameters)


def ignore_suggestion(mixtures: Sequence[StackedMoE]) -> str:
    """Return ``ignore=[...]`` with patterns for these modules in all layers."""
    ends = dict.fromkeys(_suffix_pattern(mixture.name) for mixture in mixtures)
    shown = ", ".join(f"'re:{end}'" for end in ends)
    return f"ignore=[{shown}]"


def _suffix_pattern(name: str) -> str:
    r"""Pattern for the suffix of an MoE module's name after its layer number.

    >>> _suffix_pattern("model.layers.3.mlp.experts")
    '.*\\.experts\\..*'
    >>> _suffix_pattern("model.layers.3.mlp.input_linear")
    '.*\\.mlp\\.input_linear$'
    """
    parts = name.split(".")
    start = 1 + max((place for place, part in enumerate(parts) if part.isdecimal()), default=-1)
    called = next((part for part in parts[start:] if "experts" in part), None)
    behind = r".*\." if start or (called and called != parts[0]) else ""
    if called:
        return rf"{behind}{re.escape(called)}\..*"
    return rf"{behind}{re.escape('.'.join(parts[start:]))}$"
