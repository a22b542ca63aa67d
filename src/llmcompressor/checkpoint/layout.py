# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of tensors in a checkpoint, where they differ from the module tree.

transformers renames, fuses and splits tensors while loading, and does the reverse while saving. The
tensors of a compressed module can be renamed but not fused or split (packed words and scales have
no meaning across modules). So they, and the tensors that would be fused with them, keep the
partition of the module tree.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import (
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.names import named_modules, tells_digits

__all__ = [
    "LoadedName",
    "checkpoint_layout",
    "checkpoint_names",
    "forget_dequantizing",
    "loaded_names",
    "merges_experts",
    "merges_weights",
    "owned_by_model",
    "sources_of_plain",
    "split_names",
    "stacked_names",
    "stacks_tensors",
    "stored_as",
]


# a letter with a digit, as in w1: no pattern that has it can tell one layer from another by it
_LETTERED = re.compile(r"(?<!\\)[A-Za-z_]\d+")
_STAND_INS = "123456789"
_EXPERT = re.compile(r"((?:.*\.)?experts)\.(?:\d+|\*)(?:\.|$)")


@dataclass(frozen=True)
class _Transforms:
    """A model's weight conversions; the names of all layers and experts are looked up once.

    Attributes:
        renamings: the transforms that change a name.
        converters: the transforms that merge or split tensors.
        reverse: map from the module tree to the checkpoint.
    """

    renamings: list[WeightRenaming]
    converters: list[WeightConverter]
    reverse: bool
    _known: dict[tuple[str, bool], tuple[str, str | None]] = field(default_factory=dict)

    def name(self, key: str, *, convert: bool) -> tuple[str, str | None]:
        """Return a tensor's new name, and the pattern by which it is merged or split."""
        if self._tells_numbers:
            return self._renamed(key, convert=convert)
        owner, dot, own = key.rpartition(".")
        if own.isdigit():
            owner, dot, own = key, "", ""
        form, numbers = _form_of(owner)
        form += dot + own
        if (form, convert) not in self._known:
            self._known[form, convert] = self._renamed(form, convert=convert)
        renamed, pattern = self._known[form, convert]
        if not numbers:
            return renamed, pattern
        return ".".join([numbers.get(part, part) for part in renamed.split(".")]), pattern

    def loaded(
        self, key: str, state: dict[str, Any], prefix: str, *, convert: bool = True
    ) -> tuple[str, str | None]:
        """Map a name as :meth:`name` does, with the base model's prefix as ``state`` has it."""
        renamed, pattern = self.name(key, convert=convert)
        if f"{prefix}.{renamed}" in state or (
            renamed.startswith(prefix) and renamed[len(prefix) + 1 :] in state
        ):
            converters = self.converters if convert else []
            renamed, pattern = rename_source_key(key, self.renamings, converters, prefix, state)
        return str(renamed), pattern

    def _renamed(self, key: str, *, convert: bool) -> tuple[str, str | None]:
        converters = self.converters if convert else []
        renamed, pattern = rename_source_key(key, self.renamings, converters, reverse=self.reverse)
        return str(renamed), pattern

    @functools.cached_property
    def _tells_numbers(self) -> bool:
        """True if a transform may depend on the number of a layer or an expert."""
        return any(
            tells_digits(_LETTERED.sub("", text))
            for one in (*self.renamings, *self.converters)
            for text in (
                *one.source_patterns,
                *one.target_patterns,
                getattr(one, "scope_prefix", None) or "",
            )
        )


@functools.lru_cache(maxsize=2**17)  # a module has several tensors, and each is asked for often
def _form_of(key: str) -> tuple[str, dict[str, str]]:
    """Return a name with canonical layer and expert numbers, and the numbers that they replace.

    >>> _form_of("layers.47.experts.5.w1.weight")
    ('layers.11.experts.2.w1.weight', {'11': '47', '2': '5'})
    """
    parts, numbers = key.split("."), dict[str, str]()
    for place, part in enumerate(parts):
        if part.isdigit():
            # of the same length: a pattern may match a single digit only
            if len(numbers) == len(_STAND_INS):
                return key, {}
            stand_in = _STAND_INS[len(numbers)] * len(part)
            numbers[stand_in] = part
            parts[place] = stand_in
    return ".".join(parts), numbers


def _transforms(model: PreTrainedModel, *, reverse: bool) -> _Transforms:
    """Return fresh transforms, since some store what they have matched."""
    found: list[Any] | None = getattr(model, "_weight_conversions", None)
    if found is None:
        found = get_model_conversion_mapping(model, add_legacy=not reverse)
        if reverse:
            # the prefix in the checkpoint of a model that was never loaded is unknown
            found = [entry for entry in found if not isinstance(entry, PrefixChange)]
    if reverse:
        found = [entry.reverse_transform() for entry in reversed(found)]
    return _Transforms(
        [entry for entry in found if isinstance(entry, WeightRenaming)],
        [entry for entry in found if isinstance(entry, WeightConverter)],
        reverse,
    )


def forget_dequantizing(model: Any) -> None:
    """Make a model that was dequantized while loading be saved as it is now.

    transformers records what it did to each tensor and reverts it when the model is saved. What is
    not compressed would be quantized again as the files were, without a warning.

    Args:
        model: any model; only a dequantized transformers model is changed.
    """
    found = getattr(model, "_weight_conversions", None) or ()
    is_dequantized = getattr(model, "hf_quantizer", None) is None and any(map(_dequantizes, found))
    if not is_dequantized:
        return
    prefixes = [_patterns(entry) for entry in found if isinstance(entry, PrefixChange)]
    model._weight_conversions = [
        entry
        for entry in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(entry, PrefixChange) or _patterns(entry) in prefixes
    ]


def _dequantizes(transform: Any) -> bool:
    return any(hasattr(one, "hf_quantizer") for one in getattr(transform, "operations", ()))


def _patterns(transform: Any) -> tuple[list[str], list[str]]:
    return list(transform.source_patterns), list(transform.target_patterns)


def stacks_tensors(kind: str) -> bool:
    """Return True if transformers stacks tensors while loading models of a type or class."""
    conversions_of: Any = get_checkpoint_conversion_mapping
    return any(map(_is_stacking, conversions_of(kind) or ()))


def _is_stacking(transform: Any) -> bool:
    """Return True if a transform's first operation stacks tensors."""
    return (
        isinstance(transform, WeightConverter) and type(transform.operations[0]) is MergeModulelist
    )


def stacked_names(model: PreTrainedModel, names: Mapping[str, LoadedName]) -> list[list[str]]:
    """Return the checkpoint tensors that each stack is built from.

    Args:
        model: the model.
        names: the result of :func:`loaded_names`.
    """
    patterns = {
        pattern
        for converter in _transforms(model, reverse=False).converters
        if _is_stacking(converter)
        for pattern in converter.source_patterns
    }
    stacks: dict[tuple[str, str | None], list[str]] = {}
    for name, own in names.items():
        if own.pattern in patterns:
            stacks.setdefault((own.target, own.pattern), []).append(name)
    return list(stacks.values())


def checkpoint_names(model: PreTrainedModel, module_names: Iterable[str]) -> dict[str, str]:
    """Return the name of each module's tensors in a checkpoint."""
    transforms = _transforms(model, reverse=True)
    names = {}
    for name in module_names:
        renamed, _ = transforms.name(f"{name}.weight", convert=False)
        names[name] = renamed.removesuffix(".weight") if renamed.endswith(".weight") else name
    return names


def stored_as(model: PreTrainedModel, modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the modules that have other names in a checkpoint, and those names.

    Args:
        model: the model.
        modules: names of its modules. Experts count as one, whether they are modules or stacked.

    Returns:
        Module name → the names of its tensors' modules in a checkpoint, where they differ.
    """
    owned: dict[str, list[str]] = {}
    for key in model.state_dict():
        owned.setdefault(_of_all_experts(key.rpartition(".")[0]), []).append(key)
    transforms = _transforms(model, reverse=True)
    found = {}
    for module in sorted({_of_all_experts(module) for module in modules} & owned.keys()):
        targets = (transforms.name(key, convert=True)[0] for key in owned[module])
        names = {_of_all_experts(target.rpartition(".")[0]) for target in targets}
        if names != {module}:
            found[module] = sorted(names)
    return found


def _of_all_experts(name: str) -> str:
    """Return the module that holds all experts for an expert's module, else the module itself.

    >>> _of_all_experts("h.0.mlp.experts.*.up"), _of_all_experts("h.0.mlp.shared_experts.up")
    ('h.0.mlp.experts', 'h.0.mlp.shared_experts.up')
    """
    found = _EXPERT.match(name)
    return name if found is None else found[1]


def checkpoint_layout(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], compressed: Iterable[str]
) -> dict[str, Tensor]:
    """Return uncompressed tensors under the names and in the shapes of a checkpoint.

    Args:
        model: the model they come from.
        tensors: name in the module tree → tensor, without those of compressed modules.
        compressed: names of the compressed modules.

    Returns:
        Name in the checkpoint → tensor.
    """
    transforms = _transforms(model, reverse=True)
    fused_with_compressed = set()
    for module in compressed:
        for own in ("weight", "bias"):
            target, pattern = transforms.name(f"{module}.{own}", convert=True)
            if pattern is not None:
                fused_with_compressed.add(target)

    apart: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        target, pattern = transforms.name(key, convert=True)
        keep = pattern is not None and (target in fused_with_compressed or _is_within(model, key))
        (apart if keep else rest)[key] = tensor
    result: dict[str, Tensor] = dict(revert_weight_conversion(model, rest))
    for key, tensor in apart.items():
        result[transforms.name(key, convert=False)[0]] = tensor
    return result


def _is_within(model: PreTrainedModel, key: str) -> bool:
    """Return True if a tensor belongs to a module inside a Linear, such as a rotation matrix.

    It is named after the Linear, but takes no part in the conversion of the Linear's weight.
    """
    owner = key.rpartition(".")[0].rpartition(".")[0]
    try:
        return isinstance(model.get_submodule(owner), torch.nn.Linear)
    except AttributeError:
        return False


def sources_of_plain(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], compressed: Iterable[str]
) -> list[str]:
    """Return modules that exist only in a checkpoint, where one tensor fuses several modules.

    A module that is written unfused, because a part of it is compressed, is not among them.

    Args:
        model: the model.
        tensors: name in the module tree → tensor, without those of compressed modules.
        compressed: names of the compressed modules.
    """
    transforms = _transforms(model, reverse=True)
    # only the names that transformers' own operations give are needed, no values
    stand_ins = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
        if not name.endswith(".weight") or transforms.name(name, convert=True)[1] is not None
    }
    if not stand_ins:
        return []
    apart = {
        transforms.name(name, convert=False)[0] for name in stand_ins if name.endswith(".weight")
    }
    return [
        name.removesuffix(".weight")
        for name in checkpoint_layout(model, stand_ins, compressed)
        if name.endswith(".weight") and name not in apart
    ]


def split_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return each fused checkpoint tensor and the model's tensors that it is converted to."""
    transforms = _transforms(model, reverse=True)
    found: dict[str, list[str]] = {}
    for name in model.state_dict():
        target, pattern = transforms.name(name, convert=True)
        if pattern is not None:
            found.setdefault(target, []).append(name)
    return found


def merges_experts(model: PreTrainedModel) -> bool:
    """Return True if the checkpoint stores one ``….weight`` per expert and the model a stack."""
    return any(
        all("experts" in pattern for pattern in converter.source_patterns)
        and any(pattern.endswith(".weight") for pattern in converter.source_patterns)
        for converter in _transforms(model, reverse=False).converters
    )


def merges_weights(model: PreTrainedModel, quantized: Collection[str]) -> bool:
    """Return True if the model merges plain weights into tensors that are stored separately.

    Args:
        model: the model.
        quantized: its quantized modules, which are skipped, as experts are.
    """
    transforms = _transforms(model, reverse=True)
    patterns = {
        pattern
        for converter in transforms.converters
        if all(_is_plain_weight(target) for target in converter.target_patterns)
        for pattern in converter.source_patterns
    }
    return bool(patterns) and any(
        transforms.name(name, convert=True)[1] in patterns
        for name in model.state_dict()
        if name.rpartition(".")[0] not in quantized
    )


def _is_plain_weight(pattern: str) -> bool:
    return pattern.endswith(".weight") and "experts" not in pattern


def owned_by_model(
    model: PreTrainedModel, keys: Iterable[str], state: Mapping[str, Tensor]
) -> set[str]:
    """Return the names of a checkpoint's tensors that ``model`` loads.

    Args:
        model: the model.
        keys: names in the checkpoint.
        state: the model's state dict.
    """
    every = list(keys)
    owned = set(loaded_names(model, every, state))
    opened = {
        f"{name}.{stack}"
        for name, module in named_modules(model)
        if isinstance(module, LinearExperts)
        for stack in module.form.stacks
    }
    if opened:  # expert stacks that were unfused into Linears
        transforms = _transforms(model, reverse=False)
        given: dict[str, Any] = dict.fromkeys([*state, *opened])
        prefix = model.base_model_prefix
        for key in set(every) - owned:
            renamed, _ = transforms.loaded(key, given, prefix)
            if renamed in opened:
                owned.add(key)
    return owned


class LoadedName(NamedTuple):
    """The tensor of the model that a checkpoint tensor is loaded into."""

    target: str
    """The model's tensor that it becomes, or becomes a part of."""
    merged: bool
    """Whether it is merged with others, or split, on the way."""
    pattern: str | None = None
    """The pattern by which it is."""


def loaded_names(
    model: PreTrainedModel, keys: Iterable[str], state: Mapping[str, Tensor]
) -> dict[str, LoadedName]:
    """Return the model's tensor for each checkpoint tensor that the model loads.

    Args:
        model: the model.
        keys: names in the checkpoint.
        state: the model's state dict.
    """
    transforms = _transforms(model, reverse=False)
    own_names, prefix = dict(state), model.base_model_prefix
    names = {}
    for key in keys:
        renamed, pattern = transforms.loaded(key, own_names, prefix)
        if renamed in state:
            names[key] = LoadedName(renamed, pattern is not None, pattern)
        elif key in state:
            names[key] = LoadedName(key, False)
        elif pattern is not None:  # part of a stack that was unfused
            alone, _ = transforms.loaded(key, own_names, prefix, convert=False)
            if alone in state:
                names[key] = LoadedName(alone, False)
    return names
