# SPDX-License-Identifier: Apache-2.0
"""Matches of a recipe's patterns, and the resulting scheme of every weight matrix."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Embedding, Linear, Module

from llmcompressor.core.contract import PlannedModule
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import InputError
from llmcompressor.modeling.matching import as_targets, check_targets, matches, suggest_targets
from llmcompressor.modeling.names import NameForms, TargetIndex, named_modules, own_parameters
from llmcompressor.planning.result import Match, ModuleRow
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.schemes.assign import (
    is_quantizable,
    matching_targets,
    reason_to_leave,
)
from llmcompressor.schemes.checks import describe_arguments
from llmcompressor.schemes.presets import format_of

STACK = "a stack of matrices, which no target reaches"
_MOST_NAMES = 3
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def name_pattern(name: str) -> str:
    """Replace the numbers of a module's name by ``*``, which is equal for all blocks.

    >>> name_pattern("model.layers.12.mlp.experts.3.up_proj")
    'model.layers.*.mlp.experts.*.up_proj'
    """
    return _NUMBER.sub("*", name)


def describe(scheme: Any) -> str:
    """Describe a scheme in a few words: weights, then inputs and outputs.

    Args:
        scheme: a ``QuantizationScheme``.
    """
    titles = {"weights": "", "input_activations": "inputs ", "output_activations": "outputs "}
    given = {title: getattr(scheme, name) for name, title in titles.items()}
    parts = [title + describe_arguments(args) for title, args in given.items() if args is not None]
    return ", ".join(parts) or "nothing"


def descriptions(planned: Iterable[PlannedModule]) -> dict[int, str]:
    """Descriptions by identity of the scheme, as many modules share a few schemes."""
    schemes = {id(one.scheme): one.scheme for one in planned}
    return {key: describe(scheme) for key, scheme in schemes.items()}


def match_patterns(
    model: Module, modifiers: Iterable[tuple[Modifier, Collection[str]]]
) -> list[Match]:
    """Match each target and ignore entry of each modifier against the model.

    Args:
        model: the model.
        modifiers: of the recipe, each with the names of the modules that it quantizes, or that
            it prunes and their ancestors; without names if its initialization failed.
    """
    modules = dict(named_modules(model))
    found: list[Match] = []
    for modifier, names in modifiers:
        matched, decided = _tally(modules, *_patterns_of(modifier), set(names))
        for (role, pattern), own in matched.items():
            first = decided[role, pattern] or own
            found.append(
                Match(
                    type(modifier).__name__,
                    role,
                    pattern,
                    len(own),
                    len(decided[role, pattern]),
                    tuple(first[:_MOST_NAMES]),
                    "" if own else suggest_targets(model, pattern),
                )
            )
    return found


def unmatched_targets(model: Module, modifiers: Iterable[Modifier]) -> Iterator[str]:
    """Yield an error message with near matches for targets that match nothing.

    Args:
        model: the model.
        modifiers: modifiers whose targets are names or classes of modules; those with
            ``allow_unmatched`` are skipped.
    """
    for modifier in modifiers:
        if not getattr(modifier, "allow_unmatched", False):
            try:
                check_targets(model, _patterns_of(modifier)[0])
            except InputError as error:
                yield str(error)


class _PatternHits(NamedTuple):
    """Patterns that match all modules of the same class and name form."""

    targets: list[str]
    deciding: list[str]
    ignore: list[str]


_Tally = dict[tuple[str, str], list[str]]
"""Role and pattern → names of modules."""


def _tally(
    modules: Mapping[str, Module],
    targets: Sequence[str],
    ignore: Sequence[str],
    quantized: set[str],
) -> tuple[_Tally, _Tally]:
    """Return the modules that each pattern matches, and those that it decides."""
    roles = [*(("target", one) for one in targets), *(("ignore", one) for one in ignore)]
    matched: _Tally = {key: [] for key in roles}
    decided: _Tally = {key: [] for key in roles}
    forms = NameForms((*targets, *ignore))
    meant, left_out = TargetIndex(targets), TargetIndex(ignore)
    known: dict[object, _PatternHits] = {}
    for name, module in modules.items():
        form = (type(module), forms.of(name))
        if form not in known:
            near = meant.of(name, module)
            known[form] = _PatternHits(
                [one for one in near if matches(name, module, one)],
                matching_targets(name, module, near)[:1],
                [one for one in left_out.of(name, module) if matches(name, module, one)],
            )
        hits = known[form]
        for one in hits.targets:
            matched["target", one].append(name)
            if name in quantized and one in hits.deciding:
                decided["target", one].append(name)
        is_wanted = bool(hits.targets) and is_quantizable(module)
        for one in hits.ignore:
            matched["ignore", one].append(name)
            if is_wanted:
                decided["ignore", one].append(name)
    return matched, decided


def _patterns_of(modifier: Modifier) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the targets and ignore entries of a modifier, including its groups'."""
    resolve = getattr(modifier, "resolve_quantization_config", None)
    if resolve is not None:
        resolved = resolve()
        return tuple(resolved.targets), tuple(resolved.ignore)
    return as_targets(getattr(modifier, "targets", None)), as_targets(
        getattr(modifier, "ignore", None)
    )


def module_rows(
    model: Module, modifiers: Sequence[Modifier], planned: Sequence[PlannedModule]
) -> list[ModuleRow]:
    """List the scheme of every weight matrix of the model, grouped by name pattern.

    Args:
        model: the model.
        modifiers: of the recipe; their ignore entries explain dense modules.
        planned: the modules that will be quantized.
    """
    schemes = {one.name: one.scheme for one in planned}
    unique = {id(scheme): scheme for scheme in schemes.values()}
    words = descriptions(planned)
    formats = {key: str(format_of(one)) for key, one in unique.items()}
    patterns = [(modifier, *_patterns_of(modifier)) for modifier in modifiers]
    wanted = [(one, TargetIndex(targets), TargetIndex(ignore)) for one, targets, ignore in patterns]
    embedded = {
        id(parameter)
        for _, module in named_modules(model)
        if isinstance(module, Embedding)
        for parameter in own_parameters(module)
    }
    rows: dict[tuple[str, str, str, str], list[int]] = {}
    for name, module, weights in _matrices(model):
        scheme = schemes.get(name)
        if scheme is not None:
            key = (name_pattern(name), words[id(scheme)], formats[id(scheme)], "")
        else:
            key = (
                name_pattern(name),
                "dense",
                "",
                _why_dense(model, name, module, wanted, embedded),
            )
        rows.setdefault(key, []).append(weights)
    for one in planned:
        if one.is_attention:
            rows.setdefault((name_pattern(one.name), describe(one.scheme), "", ""), []).append(0)
    return [
        ModuleRow(pattern, scheme, form, len(sizes), sum(sizes), why)
        for (pattern, scheme, form, why), sizes in rows.items()
    ]


def _matrices(model: Module) -> Iterator[tuple[str, Module, int]]:
    """Yield modules that own matrices or stacks of them, with their number of weights."""
    for name, module in named_modules(model):
        sizes = [one.numel() for one in own_parameters(module) if one.ndim > 1]
        if sizes:
            yield name, module, sum(sizes)


def _why_dense(
    model: Module,
    name: str,
    module: Module,
    patterns: Sequence[tuple[Modifier, TargetIndex, TargetIndex]],
    embedded: Collection[int],
) -> str:
    """Return the reason why a module with a matrix is not quantized."""
    targeted: list[Modifier] = []
    for modifier, targets, ignore in patterns:
        if any(matches(name, module, one) for one in targets.of(name, module)):
            targeted.append(modifier)
            near = ignore.of(name, module)
            entry = next((one for one in near if matches(name, module, one)), None)
            if entry is not None:
                return f"ignored by {entry!r}"
    parent = model.get_submodule(name.rpartition(".")[0])
    if targeted and (reason := reason_to_leave(name, module, parent)):
        return reason
    if targeted and any(id(one) in embedded for one in own_parameters(module)):
        return "its weight is the input embedding's"
    if targeted:
        quantizing = any(isinstance(one, QuantizationMixin) for one in targeted)
        name = "its scheme" if quantizing else type(targeted[0]).__name__
        return f"{name} quantizes no weights"
    stack = any(isinstance(one, Tensor) and one.ndim == 3 for one in module.parameters())
    if stack and not isinstance(module, Linear | Embedding):
        return STACK
    return "no target"
