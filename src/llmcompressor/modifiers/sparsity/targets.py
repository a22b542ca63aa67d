# SPDX-License-Identifier: Apache-2.0
"""Target matching of one-shot pruning: from targets to modules and their sparsities.

A target selects *layers*: a Linear by its class or name, or a module that contains Linears, such as
a decoder layer. The Linears and convolutions of these layers are pruned. A target that matches no
module is matched against the names of weights (``re:.*q_proj.weight``), and ``__ALL_PRUNABLE__``
stands for every prunable module. The routers of MoE layers are left out unless a target names them.

A layer that several targets match belongs to the first of them. A list of sparsities has one entry
per target, each of which has to apply to some layer, or one per layer in model order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Embedding, Module

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.matching import (
    as_targets,
    check_targets,
    match_named_modules,
    matches,
    matches_name,
    warn_of_containers,
)
from llmcompressor.modifiers.sparsity.matrices import is_prunable, matrix_shape, misfit
from llmcompressor.names import Possible, named_modules
from llmcompressor.numerics.masks import NofM
from llmcompressor.schemes.assign import is_router, output_head
from llmcompressor.wording import listed

__all__ = ["ALL_PRUNABLE", "Layers", "find_layers", "means_linear"]

ALL_PRUNABLE = frozenset({"__ALL_PRUNABLE__", "__ALL_QUANTIZABLE__", "__ALL__"})
"""Words for every module that can be pruned; of what else the last two mean nothing can be."""


@dataclass(frozen=True)
class Layers:
    """Layers that targets match in a model.

    Attributes:
        names: module to prune → its name, in model order.
        layer: module to prune → name of its layer.
        sparsity: name of each layer → its sparsity.
    """

    names: dict[Module, str]
    layer: dict[Module, str]
    sparsity: dict[str, float]


def find_layers(
    model: Module,
    targets: str | Sequence[str],
    ignore: str | Sequence[str],
    sparsity: float | Sequence[float],
    group: NofM | None,
) -> Layers:
    """Find the layers, the modules to prune in each, and their sparsities.

    Raises:
        TargetError: a target matches nothing, a module cannot be pruned, or sparsities do not fit
            the layers.
    """
    wanted = as_targets(targets)
    if not wanted:
        raise TargetError("targets is empty, so there is nothing to prune.", "Name some: Linear.")
    everything = dict(named_modules(model))
    left_out = _Ignored(as_targets(ignore))
    places = _places(model, everything, wanted, left_out)
    rank = {target: place for place, target in reversed(list(enumerate(wanted)))}
    names: dict[Module, str] = {}
    layer: dict[Module, str] = {}
    for name in sorted(places, key=lambda place: rank[places[place]]):
        for inner, module in _prunable_in(everything, name):
            if module not in names and not left_out.means(inner, module):
                names[module], layer[module] = inner, name
    _leave_unnamed(model, wanted, names, layer)
    _warn_of_head(model, wanted, names)
    if not names:
        raise TargetError(
            f"Nothing in {type(model).__name__} is left to prune by "
            f"{', '.join(map(repr, wanted))}: what matches holds no Linear and no convolution, "
            "or is ignored.",
            "Correct targets or ignore.",
        )
    meant = (inner for name in places for inner, _ in _prunable_in(everything, name))
    warn_of_containers(model, left_out.entries, meant)
    _check(names, group)
    used = set(layer.values())
    held = [name for name in places if name in used]
    order = {module: place for place, module in enumerate(everything.values())}
    names = dict(sorted(names.items(), key=lambda item: order[item[0]]))
    return Layers(names, layer, _sparsities(sparsity, held, places, wanted))


def means_linear(
    name: str,
    modules: Mapping[str, Module],
    targets: str | Sequence[str],
    ignore: str | Sequence[str],
) -> bool:
    """Return True if targets would match a Linear called ``name``, its weight's name or its layer.

    Args:
        name: name of the Linear.
        modules: the Linear and the modules that contain it, by name.
        targets: layers.
        ignore: modules or weights that are left out; takes precedence.
    """
    ignored = as_targets(ignore)
    layers = {
        each: module
        for each, module in modules.items()
        if not any(matches(each, module, entry) for entry in ignored)
    }
    if any(_means_weight(name, entry) for entry in ignored):
        return False
    return name in layers and any(
        target in ALL_PRUNABLE
        or matches_name(f"{name}.weight", target)
        or any(matches(each, module, target) for each, module in layers.items())
        for target in as_targets(targets)
    )


class _Ignored:
    """Matcher of ignore entries: modules, and weights whose names are spelled out."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = tuple(entries)
        self._of_modules = Possible(entries)
        self._of_weights = Possible(entry for entry in entries if "weight" in entry)

    def means(self, name: str, module: Module) -> bool:
        """Return True if an entry matches a module or its weight."""
        near = self._of_modules.of(name, module)
        return any(matches(name, module, entry) for entry in near) or bool(
            self.of_weight(name, module)
        )

    def of_weight(self, name: str, module: Module) -> list[str]:
        """The entries that spell out the name of a module's weight."""
        near = self._of_weights.of(f"{name}.weight", module)
        return [entry for entry in near if _means_weight(name, entry)]


def _places(
    model: Module, everything: dict[str, Module], wanted: Sequence[str], left_out: _Ignored
) -> dict[str, str]:
    """Name of each layer → the first target that matches it, in model order."""
    possible = Possible(wanted)
    hits = {
        name: [one for one in possible.of(name, module) if matches(name, module, one)]
        for name, module in everything.items()
    }
    met = {target for found in hits.values() for target in found}
    everywhere = [target for target in wanted if target in ALL_PRUNABLE]
    of_modules = met | ALL_PRUNABLE
    weights = Possible(target for target in wanted if target not in of_modules)
    first = {target: place for place, target in reversed(list(enumerate(wanted)))}
    found: dict[str, str] = {}
    of_weights: set[str] = set()
    for name, module in everything.items():
        if is_prunable(module):
            weight = f"{name}.weight"
            hits[name] += everywhere
            hits[name] += [one for one in weights.of(weight, module) if matches_name(weight, one)]
            of_weights.update(left_out.of_weight(name, module))
        if hits[name]:
            found[name] = min(hits[name], key=first.__getitem__)
    met = {target for each in hits.values() for target in each}
    plain = [target for target in wanted if target not in met]
    check_targets(model, plain, [entry for entry in left_out.entries if entry not in of_weights])
    kept = dict(match_named_modules(model, [name for name in found if name], left_out.entries))
    if "" in found:
        kept[""] = model
    return {name: target for name, target in found.items() if name in kept}


def _prunable_in(everything: Mapping[str, Module], layer: str) -> Iterator[tuple[str, Module]]:
    for inner, module in named_modules(everything[layer]):
        name = f"{layer}.{inner}".strip(".")
        if is_prunable(module) and name in everything:
            yield name, module


def _means_weight(name: str, entry: str) -> bool:
    """Return True if an entry spells out a weight's name; negative patterns would match any."""
    return "weight" in entry and matches_name(f"{name}.weight", entry)


def _leave_unnamed(
    model: Module, wanted: Sequence[str], names: dict[Module, str], layer: dict[Module, str]
) -> None:
    """Leave out tied heads and routers unless a target names them.

    A router has few weights and decides the routing; inference engines serve it dense.
    """
    tables = {id(one.weight) for one in model.modules() if isinstance(one, Embedding)}
    heads: list[str] = []
    routers: list[str] = []
    for module, name in list(names.items()):
        kind = (
            heads if id(module.weight) in tables else routers if is_router(name, module) else None
        )
        if kind is not None and not _is_named(name, wanted):
            kind.append(name)
            del names[module], layer[module]
    for name in heads:
        logger.info(
            f"Left unpruned: {name}, whose weight is the input embedding. Name it as a target "
            "to prune both."
        )
    if routers:
        logger.info(
            f"Left unpruned: {len(routers)} router gate(s) ({listed(routers)}). To prune one, "
            "target it by name."
        )


def _warn_of_head(model: Module, wanted: Sequence[str], names: Mapping[Module, str]) -> None:
    """Warn if the output head is pruned without being named, as earlier releases left it out."""
    head = output_head(model)
    if head is not None and head in names and not _is_named(names[head], wanted):
        logger.warning(
            f"{names[head]}, which gives the logits, is pruned too: nothing leaves it out. If that "
            f"is not meant, put {names[head]} on the ignore list."
        )


def _is_named(name: str, wanted: Sequence[str]) -> bool:
    """Return True if a target matches a module by its name or its weight's name."""
    return any(
        matches_name(name, target) or matches_name(f"{name}.weight", target) for target in wanted
    )


def _check(names: dict[Module, str], group: NofM | None) -> None:
    reasons = []
    for module, name in names.items():
        reason = misfit(module)
        if reason is None and group is not None:
            reason = group.misfit(matrix_shape(module))
        if reason is None and _is_quantized(module):
            reason = "it is quantized already"
        if reason is not None:
            reasons.append(f"{name} ({reason})")
    if reasons:
        raise TargetError(
            f"These cannot be pruned: {listed(reasons)}.",
            "Put them on the ignore list, or choose another mask_structure.",
        )


def _is_quantized(module: Module) -> bool:
    return getattr(module, "quantization_status", None) is not None or not isinstance(
        getattr(module, "weight", None), Tensor
    )


def _sparsities(
    sparsity: float | Sequence[float],
    layers: Sequence[str],
    target_of: dict[str, str],
    wanted: Sequence[str],
) -> dict[str, float]:
    if isinstance(sparsity, int | float):
        return dict.fromkeys(layers, float(sparsity))
    if len(sparsity) == len(wanted):
        deciding = {target_of[layer] for layer in layers}
        idle = [target for target in wanted if target not in deciding]
        if idle:
            raise TargetError(
                f"The sparsity of {idle[0]!r} decides about nothing: what this target means is "
                "ignored, or meant by a target before it.",
                "Put narrower targets before wider ones, or leave it out with its sparsity.",
            )
        by_target = dict(zip(wanted, sparsity, strict=True))
        return {layer: by_target[target_of[layer]] for layer in layers}
    if len(sparsity) == len(layers):
        return dict(zip(layers, sparsity, strict=True))
    raise TargetError(
        f"sparsity has {len(sparsity)} values, and there are {len(wanted)} target(s), which mean "
        f"{len(layers)} layer(s).",
        "Give one number, one per target, or one per layer in the order of the model.",
    )
