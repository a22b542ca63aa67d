# SPDX-License-Identifier: Apache-2.0
"""Further quantization of a partly quantized checkpoint, whose configuration is kept.

The schemes of two runs are merged into one ``quantization_config``. Each module must match its own
scheme and no other, so a target that would also match a module of the other run (``Linear`` does)
is replaced by the names of its modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from compressed_tensors.config import CompressionFormat
from compressed_tensors.utils.match import match_name, match_targets
from torch.nn import Module

from llmcompressor.checkpoint.expert_groups import found_for_experts
from llmcompressor.checkpoint.source import (
    check_format,
    is_compressed_tensors,
    quantization_method,
    quantized_error,
    settings_of,
)
from llmcompressor.errors import CheckpointError
from llmcompressor.modeling.fused import is_expert

__all__ = ["existing_quantization", "merge_quantization"]

_COMPRESSED = "compressed"
_REGEX = "re:"
_NOT_KEPT = ("transform_config", "sparsity_config")


def existing_quantization(model: str, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a partly quantized checkpoint; ``None`` without one.

    Args:
        model: the checkpoint's folder.
        config: its ``config.json``.

    Raises:
        CheckpointError: it was quantized by another method, or part of it cannot be kept.
    """
    method = quantization_method(config)
    if method is None:
        return None
    found = settings_of(config)
    if not is_compressed_tensors(method) or not found:
        raise quantized_error(model, method)
    check_format(model, found)
    problems = [f"a {name}" for name in _NOT_KEPT if found.get(name)]
    if found.get("quantization_status") != _COMPRESSED:
        problems.append(f"the status {found.get('quantization_status')!r}")
    if problems:
        raise CheckpointError(
            f"The model {model} is quantized already, with {problems[0]}, which another scheme "
            "beside it cannot keep.",
            "Compress the original, unquantized model.",
        )
    return found


def merge_quantization(
    new: Mapping[str, Any],
    modules: Mapping[str, Module],
    old: Mapping[str, Any],
    compressed: Mapping[str, Module],
) -> dict[str, Any]:
    """Merge two quantization configurations into one.

    Args:
        new: the configuration that this run writes.
        modules: its modules, by name.
        old: the source's configuration.
        compressed: modules that were quantized before, by name; placeholders of their classes do.

    Returns:
        The groups of both, those of the source first, unless experts need another order.

    Raises:
        CheckpointError: the source has no scheme for one of its quantized modules.
    """
    before = _Groups(old, compressed)
    after = _Groups(new, modules)
    groups: dict[str, Mapping[str, Any]] = {**before.apart_from(modules)}
    of_experts = before.with_experts() & set(groups)
    taken = set(groups)
    added = after.apart_from(compressed)
    for number, (own, group) in enumerate(added.items(), start=len(groups)):
        name = next(name for name in _names(number) if name not in taken)
        taken.add(name)
        groups[name] = group
        if own in after.with_experts():
            of_experts.add(name)
    groups = _found_for_experts(groups, of_experts)
    both = {**compressed, **modules}
    ignore = old.get("ignore") or ()
    wrong = _Targets(ignore).reaches(both)
    kept = [entry for entry in ignore if entry not in wrong]
    formats = {group["format"] for group in groups.values() if group.get("format")}
    mixed = CompressionFormat.mixed_precision.value
    return {
        **new,
        "config_groups": groups,
        "format": mixed if len(formats) > 1 else next(iter(formats), new["format"]),
        "kv_cache_scheme": old.get("kv_cache_scheme"),
        "ignore": list(dict.fromkeys([*new["ignore"], *kept])),
    }


def _found_for_experts(
    groups: Mapping[str, Mapping[str, Any]], of_experts: Collection[str]
) -> dict[str, Mapping[str, Any]]:
    names = list(groups)
    found = found_for_experts(
        [groups[name]["targets"] for name in names], {names.index(name) for name in of_experts}
    )
    return {names[index]: {**groups[names[index]], "targets": targets} for index, targets in found}


class _Targets:
    """Targets or ignore entries, with the semantics of compressed-tensors.

    Written configurations may list every module, so names are looked up in a set.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._plain = set(entries)
        self._patterns = sorted(entry for entry in self._plain if entry.startswith(_REGEX))

    def first(self, name: str, module: Module) -> str | None:
        """Return the entry that matches a module: a name before a pattern before a class."""
        if name in self._plain:
            return name
        found = match_targets(name, module, self._patterns)
        return found[0] if found else self._class(module)

    def reaches(self, modules: Mapping[str, Module]) -> set[str]:
        """Return the entries that match any of ``modules``."""
        found = self._plain & set(modules)
        found |= {str(self._class(one)) for one in modules.values()} & self._plain
        for entry in self._patterns:
            if any(match_name(name, entry) for name in modules):
                found.add(entry)
        return found

    def _class(self, module: Module) -> str | None:
        names = [cls.__name__ for cls in type(module).__mro__ if issubclass(cls, Module)]
        return next((name for name in names if name in self._plain), None)


class _Groups:
    """The config groups of one configuration and their modules."""

    def __init__(self, config: Mapping[str, Any], modules: Mapping[str, Module]) -> None:
        overall = config.get("format")
        overall = None if overall == CompressionFormat.mixed_precision.value else overall
        self._groups: dict[str, dict[str, Any]] = {
            name: {**group, "format": group.get("format") or overall}
            for name, group in config["config_groups"].items()
        }
        self._members: dict[str, dict[str, Module]] = {name: {} for name in self._groups}
        self._assign(modules, _Targets(config.get("ignore") or ()))

    def _assign(self, modules: Mapping[str, Module], ignore: _Targets) -> None:
        by_target = {
            target: name for name, group in self._groups.items() for target in group["targets"]
        }
        targets = _Targets(by_target)
        for name, module in modules.items():
            found = targets.first(name, module)
            if found is None or ignore.first(name, module) is not None:
                raise CheckpointError(
                    f"The tensors of {name} are quantized, and the quantization_config does not "
                    "say how.",
                    "Compress the original, unquantized model.",
                )
            self._members[by_target[found]][name] = module

    def with_experts(self) -> set[str]:
        """Return the names of the groups that contain MoE experts."""
        return {name for name, members in self._members.items() if any(map(is_expert, members))}

    def apart_from(self, others: Mapping[str, Module]) -> dict[str, dict[str, Any]]:
        """Return the non-empty groups, with targets that match none of ``others``."""
        apart = {}
        for name, group in self._groups.items():
            too_wide = _Targets(group["targets"]).reaches(others)
            targets = [target for target in group["targets"] if target not in too_wide]
            if too_wide:
                kept, members = _Targets(targets), self._members[name]
                targets += [one for one in members if kept.first(one, members[one]) is None]
            if targets:
                apart[name] = {**group, "targets": targets}
        return apart


def _names(first: int) -> Iterable[str]:
    number = first
    while True:
        yield f"group_{number}"
        number += 1
