# SPDX-License-Identifier: Apache-2.0
"""Matches of smoothing mappings: named modules that are smoothed together, block by block.

A smooth module and the modules that read it belong to one block. A norm without readers in its
block, or readers without a norm, are no match. So a mapping may cover some of the layers, and
layers need not be alike: where a dense layer has no router, its gate and up are all that reads the
norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.nn import Linear, Module

from llmcompressor.errors import TargetError
from llmcompressor.modeling.alike_experts import part_of_expert
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.matching import matches, sets_of
from llmcompressor.modeling.scaling import columns_of
from llmcompressor.names import Forms, Possible, named_modules
from llmcompressor.wording import listed

__all__ = ["Names", "Place", "Places", "SmoothSet", "shown", "written"]

Names = tuple[str, tuple[str, ...]]
"""A target for the smooth module, and targets for those that read it."""

_SHOWN = 8
"""Names that are written out."""


@dataclass(frozen=True, eq=False)
class SmoothSet:
    """A smooth module and the modules that balance it.

    Attributes:
        name: of the smooth module.
        smooth: the module whose output channels are divided: a norm or a Linear.
        balance: name → Linear, or router, whose input columns are multiplied.
        offset: what a norm adds to its weight.
    """

    name: str
    smooth: Module
    balance: Mapping[str, Module]
    offset: float = 0.0

    @property
    def is_norm(self) -> bool:
        """Return True if the smooth module is a norm, not a Linear."""
        return not isinstance(self.smooth, Linear)

    @property
    def columns(self) -> int:
        """Number of channels, C."""
        columns = columns_of(next(iter(self.balance.values())))
        assert columns is not None
        return columns

    @cached_property
    def linears(self) -> dict[str, Module]:
        """The members of ``balance`` whose inputs are observed: all but routers."""
        return {name: one for name, one in self.balance.items() if isinstance(one, Linear)}

    def __str__(self) -> str:
        return f"{self.name} -> {shown(self.balance)}"


@dataclass(frozen=True, eq=False)
class Place:
    """A match of a mapping: a smooth module and the modules that read it.

    Attributes:
        block: that holds it all; ``None`` for what lies in no block.
        name: of the smooth module.
        smooth: that module.
        readers: name → module.
    """

    block: str | None
    name: str
    smooth: Module
    readers: Mapping[str, Module]

    def as_set(self, offset: float) -> SmoothSet:
        """The smoothing set of this place."""
        return SmoothSet(self.name, self.smooth, self.readers, offset)

    def __str__(self) -> str:
        return f"{self.name} -> {shown(self.readers)}"


def written(names: Names) -> str:
    """Format a mapping as a recipe has it; of many targets only the first ones."""
    return f"{names[0]!r} -> [{listed(map(repr, names[1]), most=_SHOWN)}]"


def shown(names: Iterable[str]) -> str:
    """Format names for a message: those of all experts as one, and only the first of many.

    >>> shown(f"mlp.experts.{number}.{own}" for number in range(128) for own in ("w1", "w3"))
    'mlp.experts.*.w1, mlp.experts.*.w3'
    """
    parts = ((name, part_of_expert(name)) for name in names)
    every = [name if part is None else f"{part.experts}.*.{part.own}" for name, part in parts]
    every = list(dict.fromkeys(every))
    return listed(every, most=_SHOWN)


class Places:
    """Finds the matches of all mappings in one traversal of the model.

    Recipes may name each expert of each layer, and have as many mappings as the model has modules.

    Args:
        model: where to look.
        mappings: names of all that will be asked for.
    """

    def __init__(self, model: Module, mappings: Sequence[Names]) -> None:
        targets = list(dict.fromkeys(one for names in mappings for one in _targets(names)))
        blocks = set(find_blocks(model).values())
        forms, possible, known = Forms(targets), Possible(targets), dict[object, list[str]]()
        self._hits: dict[str, list[int]] = {target: [] for target in targets}
        self._modules: list[tuple[str, Module, str | None]] = []
        for name, module, block in _in_blocks(model, blocks):
            form = (type(module), forms.of(name))
            if form not in known:
                meant = possible.of(name, module)
                known[form] = [target for target in meant if matches(name, module, target)]
            for target in known[form]:
                self._hits[target].append(len(self._modules))
            if known[form]:
                self._modules.append((name, module, block))

    def unmatched(self, names: Names) -> list[str]:
        """Targets of a mapping that match no module."""
        return [target for target in _targets(names) if not self._hits[target]]

    def matched(self, target: str) -> list[str]:
        """Names of the modules that a target matches."""
        return [self._modules[place][0] for place in self._hits[target]]

    def of(self, names: Names) -> Iterator[Place]:
        """The matches of a mapping, in model order.

        Raises:
            TargetError: several modules are to be smoothed in one place, or a reader cannot take
                scales.
        """
        targets, hits = _targets(names), dict[int, list[str]]()
        for target in targets:
            for place in self._hits[target]:
                hits.setdefault(place, []).append(target)
        found: dict[str | None, list[tuple[str, Module, list[str]]]] = {}
        for place in sorted(hits):
            name, module, block = self._modules[place]
            found.setdefault(block, []).append((name, module, hits[place]))
        for block, members in found.items():
            there = {target for _, _, own in members for target in own}
            if names[0] not in there or len(there) == 1:
                continue
            for first, *others in sets_of(members, [one for one in targets if one in there]):
                yield _place(names, block, first, {n: m for pairs in others for n, m in pairs})


def _targets(names: Names) -> list[str]:
    return [names[0], *names[1]]


def _in_blocks(model: Module, blocks: set[str]) -> Iterator[tuple[str, Module, str | None]]:
    """Every module with its name and that of its block."""
    block: str | None = None
    for name, module in named_modules(model):
        if name in blocks:
            block = name
        elif block is not None and not name.startswith(f"{block}."):
            block = None
        yield name, module, block


def _place(
    names: Names, block: str | None, first: list[tuple[str, Module]], readers: dict[str, Module]
) -> Place:
    if len(first) > 1:
        raise TargetError(
            f"The mapping {written(names)} has more than one module to smooth in one place: "
            f"{shown(name for name, _ in first)}.",
            "Make its target match one of them.",
        )
    wrong = [name for name, module in readers.items() if columns_of(module) is None]
    if wrong:
        raise TargetError(
            f"{wrong[0]} is a {type(readers[wrong[0]]).__name__}; only Linears, and routers with "
            "one matrix, can take the scales that smoothing moves.",
            "Correct the mapping.",
        )
    return Place(block, first[0][0], first[0][1], readers)
