# SPDX-License-Identifier: Apache-2.0
"""Target matching of pruning modifiers for trainings: from targets to parameters.

A target is matched against modules first, by the rules of :mod:`llmcompressor.modeling.matching`: a
matching module contributes its weight, if its class is prunable. A target that matches no module is
matched against the full names of parameters (``re:.*q_proj.weight``). Two keywords stand for many:
``__ALL_PRUNABLE__`` for the weights of all such modules, ``__ALL__`` for every parameter with two
or more dimensions.

A head that is tied to the input embedding is matched by its name only, not by its class, and so is
the router of an MoE: it has few weights and decides the routing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.nn import Embedding, Module, Parameter

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.matching import (
    as_targets,
    matches,
    matches_class,
    matches_name,
    suggest_targets,
)
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.sharded import full_shape
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.assign import is_router

ALL = "__ALL__"
ALL_PRUNABLE = frozenset({"__ALL_PRUNABLE__", "__ALL_QUANTIZABLE__"})
"""Words for the weights of every module of these classes."""
PRUNABLE_CLASSES = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Conv1D")
# Suffixes of quantization parameters, which are not weights.
_HELPERS = ("_scale", "_zero_point", "_g_idx", "_step")


@dataclass(frozen=True)
class ParameterLocation:
    """Location of a parameter, which remains valid when the parameter object is replaced.

    Attributes:
        name: its full name.
        module: the module that it belongs to.
        attribute: its name in the module.
        shape: shape of the whole parameter.
        transposed: its rows are inputs, as in transformers' ``Conv1D``.
    """

    name: str
    module: Module
    attribute: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def parameter(self) -> Parameter:
        """The current parameter; FSDP replaces the original ones.

        Raises:
            TargetError: it is sharded in a way that does not allow pruning.
        """
        found = self.module._parameters.get(self.attribute)
        if found is None:  # torch stores the original tensor of a parametrized weight elsewhere
            parametrized = getattr(self.module, "parametrizations", {})
            if self.attribute in parametrized:
                found = parametrized[self.attribute].original
        if found is None or full_shape(found) != self.shape:
            raise _sharded_error(self.name)
        return found

    @property
    def record(self) -> str:
        """Its key in reports: the module's name if it is the weight, else the full name."""
        return self.name.removesuffix(".weight")


def matches_by_class(
    name: str,
    module: Module,
    targets: str | Iterable[str],
    ignore: str | Iterable[str] | None = None,
) -> bool:
    """Return True if targets would match a module called ``name`` by its class.

    Args:
        name: name of a module that is currently stored in another form.
        module: a placeholder for it.
        targets: as in :func:`find_parameters`.
        ignore: as in :func:`find_parameters`.
    """
    if any(matches(name, module, entry) for entry in as_targets(ignore)):
        return False
    return any(
        target in ALL_PRUNABLE or matches_class(module, target) for target in as_targets(targets)
    )


def find_parameters(
    model: Module, targets: str | Iterable[str], ignore: str | Iterable[str] | None = None
) -> list[ParameterLocation]:
    """The parameters that a target matches and no ignore entry does, in model order, each once.

    Args:
        model: it is not changed.
        targets: class names, names of modules or parameters, ``re:`` patterns, ``__ALL__`` or
            ``__ALL_PRUNABLE__``.
        ignore: the same without the last two; takes precedence.

    Raises:
        TargetError: a target matches no parameter, none is left, or one cannot be pruned.
    """
    index = _ParameterIndex(model)
    chosen: set[int] = set()
    for target in as_targets(targets):
        found = index.of(target)
        if not found:
            raise _unmatched_error(model, target, index)
        chosen.update(found)
    ignored = {
        number
        for number, place in enumerate(index.places)
        for entry in as_targets(ignore)
        if matches_name(place.name, entry) or matches(index.owners[number], place.module, entry)
    }
    _log_left_out(index, chosen - ignored)
    places: dict[int, ParameterLocation] = {}
    for number in sorted(chosen - ignored - index.unnamed_heads_and_routers):
        places.setdefault(id(index.parameters[number]), index.places[number])
        _check_dtype(index.places[number].name, index.parameters[number])
    if not places:
        raise TargetError(
            f"No parameter of {type(model).__name__} is left to prune by "
            f"{', '.join(map(repr, as_targets(targets)))}: what matches is ignored, a router, or a "
            "head that shares the input embedding.",
            "Correct targets or ignore.",
        )
    return list(places.values())


class _ParameterIndex:
    """All parameters of a model, by index in model order."""

    def __init__(self, model: Module) -> None:
        self.modules = list(named_modules(model))
        self.owners: list[str] = []
        self.places: list[ParameterLocation] = []
        self.parameters: list[Parameter] = []
        for owner, module in self.modules:
            for attribute, parameter in module._parameters.items():
                if parameter is not None and not attribute.endswith(_HELPERS):
                    name = f"{owner}.{attribute}" if owner else attribute
                    turned = matches_class(module, "Conv1D")
                    shape = full_shape(parameter)
                    self.owners.append(owner)
                    self.places.append(ParameterLocation(name, module, attribute, shape, turned))
                    self.parameters.append(parameter)
        embeddings = (module for _, module in self.modules if isinstance(module, Embedding))
        self._embeddings = {id(each.weight) for each in embeddings}
        self.heads: set[int] = set()
        self.routers: set[int] = set()
        self.named: set[int] = set()

    @property
    def unnamed_heads_and_routers(self) -> set[int]:
        """Tied heads and routers that no target names."""
        return (self.heads | self.routers) - self.named

    def of(self, target: str) -> set[int]:
        """Indices of the parameters that a target matches; empty if there are none."""
        if target == ALL:
            found = self._where(lambda place: len(place.shape) >= 2)
        elif target in ALL_PRUNABLE:
            found = self._where(_is_prunable)
        elif any(matches(name, module, target) for name, module in self.modules):
            found = self._where(_is_prunable) & {
                number
                for number, owner in enumerate(self.owners)
                if matches(owner, self.places[number].module, target)
            }
        else:
            found = self._where(lambda place: matches_name(place.name, target))
        self._note_heads_and_routers(found, target)
        return found

    def _where(self, holds: Callable[[ParameterLocation], bool]) -> set[int]:
        return {number for number, place in enumerate(self.places) if holds(place)}

    def _note_heads_and_routers(self, found: set[int], target: str) -> None:
        for number in found:
            place, owner = self.places[number], self.owners[number]
            if is_router(owner, place.module):
                self.routers.add(number)
            elif id(self.parameters[number]) in self._embeddings and not isinstance(
                place.module, Embedding
            ):
                self.heads.add(number)
            else:
                continue
            if matches_name(owner, target) or matches_name(place.name, target):
                self.named.add(number)


def _is_prunable(place: ParameterLocation) -> bool:
    by_class = any(matches_class(place.module, name) for name in PRUNABLE_CLASSES)
    return place.attribute == "weight" and by_class


def _log_left_out(index: _ParameterIndex, chosen: set[int]) -> None:
    for spared, why, then in (
        (index.heads, "whose weight is the input embedding", "to prune both"),
        (index.routers, "which decide where tokens go", "to prune it"),
    ):
        skipped = sorted(spared & index.unnamed_heads_and_routers & chosen)
        if skipped:
            names = join_names(index.places[number].name for number in skipped)
            logger.info(f"Left unpruned: {names}, {why}. Name it {then}.")


def _check_dtype(name: str, parameter: Parameter) -> None:
    if not parameter.is_floating_point() or parameter.element_size() < 2:
        raise TargetError(
            f"{name} cannot be pruned: its dtype is {parameter.dtype}.",
            "Load the model with weights in float32, bfloat16 or float16.",
        )


def _sharded_error(name: str) -> TargetError:
    return TargetError(
        f"{name} cannot be pruned: its module no longer holds it in the shape it had, as under "
        "FSDP version 1.",
        "Use FSDP version 2 (fsdp_version: 2), which keeps the shape of every parameter.",
    )


def _unmatched_error(model: Module, target: str, index: _ParameterIndex) -> TargetError:
    kind = type(model).__name__
    reached = [name for name, module in index.modules if matches(name, module, target)]
    if reached:
        above = tuple(f"{name}." for name in reached)
        inner = [
            owner
            for place, owner in zip(index.places, index.owners, strict=True)
            if _is_prunable(place) and owner.startswith(above)
        ]
        return TargetError(
            f"The target {target!r} matches modules of {kind} ({join_names(reached)}), and none of "
            "them has a weight that is pruned by its module.",
            f"Name those inside, as {inner[0]!r}."
            if inner
            else "Name its parameter in full, as 're:.*NAME.weight'.",
        )
    bare = target.removesuffix("$").removesuffix(".weight").removesuffix("\\")
    hint = suggest_targets(model, bare) if bare else ""
    return TargetError(
        f"The target {target!r} matches no module and no parameter of {kind}.",
        hint or f"Its parameters are {join_names([place.name for place in index.places])}.",
    )
