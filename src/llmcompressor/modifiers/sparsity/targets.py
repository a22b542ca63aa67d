# SPDX-License-Identifier: Apache-2.0
"""Which modules the targets of a one-shot pruning modifier mean, and how sparse each is to be.

A target selects *layers*: a Linear by its class or name, or something with Linears inside, such as
a decoder layer. What is pruned are the Linears and convolutions of the layers. A target that
matches no module is tried against the names of weights (``re:.*q_proj.weight``), and
``__ALL_PRUNABLE__`` stands for every module that can be pruned. The routers of mixtures are left
out unless a target names them.

What several targets mean belongs to the first of them. A list of sparsities has one per target,
each of which has to decide about something, or one per layer in the order of the model.
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
from llmcompressor.names import named_modules
from llmcompressor.numerics.masks import NofM
from llmcompressor.schemes.assign import is_router
from llmcompressor.wording import listed

__all__ = ["ALL_PRUNABLE", "Layers", "find_layers", "means_linear"]

ALL_PRUNABLE = frozenset({"__ALL_PRUNABLE__", "__ALL_QUANTIZABLE__", "__ALL__"})
"""Words for every module that can be pruned; of what else the last two mean nothing can be."""


@dataclass(frozen=True)
class Layers:
    """What targets mean in a model.

    Attributes:
        names: module to prune → its name, in the order of the model.
        layer: module to prune → name of the layer it is part of.
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
    """Find the layers, what is to be pruned in each, and how much.

    Raises:
        TargetError: a target means nothing, a module cannot be pruned so, or sparsities do not
            go with what was found.
    """
    wanted = as_targets(targets)
    if not wanted:
        raise TargetError("targets is empty, so there is nothing to prune.", "Name some: Linear.")
    everything = dict(named_modules(model))
    places = _places(model, everything, wanted, as_targets(ignore))
    names: dict[Module, str] = {}
    layer: dict[Module, str] = {}
    for name in sorted(places, key=lambda place: wanted.index(places[place])):
        for inner, module in _prunable_in(everything, name, as_targets(ignore)):
            if module not in names:
                names[module], layer[module] = inner, name
    _leave_unnamed(model, wanted, names, layer)
    if not names:
        raise TargetError(
            f"Nothing in {type(model).__name__} is left to prune by "
            f"{', '.join(map(repr, wanted))}: what matches holds no Linear and no convolution, "
            "or is ignored.",
            "Correct targets or ignore.",
        )
    meant = (inner for name in places for inner, _ in _prunable_in(everything, name, ()))
    warn_of_containers(model, as_targets(ignore), meant)
    _check(names, group)
    held = [name for name in places if name in set(layer.values())]
    order = {module: place for place, module in enumerate(everything.values())}
    names = dict(sorted(names.items(), key=lambda item: order[item[0]]))
    return Layers(names, layer, _sparsities(sparsity, held, places, wanted))


def means_linear(
    name: str,
    modules: Mapping[str, Module],
    targets: str | Sequence[str],
    ignore: str | Sequence[str],
) -> bool:
    """Whether targets mean a Linear of this name: itself, by its weight's name, or by a layer.

    Args:
        name: the Linear's.
        modules: the Linear and what holds it, by name.
        targets: layers.
        ignore: what is left alone; it wins.
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


def _places(
    model: Module,
    everything: dict[str, Module],
    wanted: Sequence[str],
    ignore: Sequence[str],
) -> dict[str, str]:
    """Name of each layer → the first target that means it; in the order of the model."""
    found: dict[str, str] = {}
    plain = []
    for target in wanted:
        by_module = any(matches(name, one, target) for name, one in everything.items())
        for name, module in everything.items():
            if target in ALL_PRUNABLE:
                hit = is_prunable(module)
            elif by_module:
                hit = matches(name, module, target)
            else:
                hit = is_prunable(module) and matches_name(f"{name}.weight", target)
            if hit:
                found.setdefault(name, target)
        if target not in found.values() and not by_module:
            plain.append(target)
    by_weight = {
        entry
        for entry in ignore
        if any(is_prunable(one) and _means_weight(name, entry) for name, one in everything.items())
    }
    check_targets(model, plain, [entry for entry in ignore if entry not in by_weight])
    kept = dict(match_named_modules(model, [name for name in found if name], ignore))
    if "" in found:
        kept[""] = model
    return {name: found[name] for name in everything if name in found and name in kept}


def _prunable_in(
    everything: dict[str, Module], layer: str, ignore: Sequence[str]
) -> Iterator[tuple[str, Module]]:
    inside = f"{layer}." if layer else ""
    for name, module in everything.items():
        if name != layer and not name.startswith(inside):
            continue
        if is_prunable(module) and not _is_ignored(name, module, ignore):
            yield name, module


def _is_ignored(name: str, module: Module, ignore: Sequence[str]) -> bool:
    """Whether an entry means a module, or spells out the name of its weight: as with targets."""
    return any(matches(name, module, entry) or _means_weight(name, entry) for entry in ignore)


def _means_weight(name: str, entry: str) -> bool:
    """A pattern that says what a name must not end in would match each weight."""
    return "weight" in entry and matches_name(f"{name}.weight", entry)


def _leave_unnamed(
    model: Module, wanted: Sequence[str], names: dict[Module, str], layer: dict[Module, str]
) -> None:
    """Heads whose weight is the input embedding and routers are pruned only if a target names them.

    A router has few weights and decides where each token goes; engines serve it as it is.
    """
    tables = {id(one.weight) for one in model.modules() if isinstance(one, Embedding)}
    heads: list[str] = []
    routers: list[str] = []
    for module, name in list(names.items()):
        kind = (
            heads if id(module.weight) in tables else routers if is_router(name, module) else None
        )
        named = any(
            matches_name(name, target) or matches_name(f"{name}.weight", target)
            for target in wanted
        )
        if kind is not None and not named:
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
        idle = [target for target in wanted if target not in map(target_of.get, layers)]
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
