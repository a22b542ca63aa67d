# SPDX-License-Identifier: Apache-2.0
"""Input statistics of experts that too few tokens are routed to.

The objective of learning is the block's output, on which an expert acts only through the tokens
routed to it. If these are few, the learned rounding generalizes poorly. Calibration passes more
tokens through such an expert; their statistics are collected here, to solve it instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.call_order import CallOrder
from llmcompressor.modeling.expert_places import ExpertPlace
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.quantization.parameters import weight_of

__all__ = ["ShownInputs", "shown_bytes"]

_MOST = 2**32
"""Bytes of second moments at once. Whole blocks are tuned: no waves of experts bound them here."""
_FLOAT = 4
_INPUTS = 2
"""Of an expert: before its first matrices, and before the last."""


def shown_bytes(columns: int, experts: int) -> int:
    """Upper bound of the bytes for the second moments of one expert input, within the total budget.

    >>> shown_bytes(1024, 8), shown_bytes(7168, 256)
    (4194304, 8388608)
    """
    return min(_FLOAT * columns**2, _MOST // (_INPUTS * experts))


class ShownInputs:
    """Second moments of the inputs of experts with few tokens.

    Few means fewer than the widest Linear of the expert has columns, or too few by the policy for
    starved experts. Statistics of experts that turn out to have enough tokens are dropped on the
    way.

    Args:
        places: Linears of experts and their places in the MoE.
        order: which of them share an input; ``None``: none do.
    """

    def __init__(self, places: Mapping[Module, ExpertPlace], order: CallOrder | None) -> None:
        self._places = places
        self._groups: dict[Module, list[Module]] = {}
        self._leaders: dict[Module, Module] = {}
        for module in places:
            group = (module,) if order is None else order.group_of(module)
            leader = next(one for one in group if one in places)
            self._groups.setdefault(leader, []).append(module)
            self._leaders[module] = leader
        self._found: dict[Module, InputStatistics] = {}
        self._left_out: set[Module] = set()
        self._widest: dict[tuple[Module, int], int] = {}
        for module, place in places.items():
            expert, columns = (place.mixture, place.expert), weight_of(module).shape[-1]
            self._widest[expert] = max(columns, self._widest.get(expert, 0))

    @property
    def leaders(self) -> Sequence[Module]:
        """The first Linear of each group that shares an input."""
        return list(self._groups)

    def add(self, leader: Module, input_TC: Tensor) -> None:
        """Accumulate an input of a group, as long as one of its experts has few tokens.

        Args:
            leader: one of :attr:`leaders`.
            input_TC: real tokens, ``[T, C]``.
        """
        if not any(map(self._has_few, self._groups[leader])):
            self._found.pop(leader, None)
        elif leader in self._found or self._has_room(leader):
            self._found[leader].update(input_TC)

    def held(self, modules: Collection[Module]) -> list[Module]:
        """The subset of ``modules`` that is not learned.

        That is every starved expert, and every other expert with few tokens that has statistics.
        """
        return [
            one
            for one in modules
            if self._has_few(one)
            and (self._places[one].policy is not None or self._leaders[one] in self._found)
        ]

    def without_room(self, modules: Collection[Module]) -> list[Module]:
        """The subset of ``modules`` whose statistics exceeded the memory budget."""
        return [one for one in modules if self._leaders.get(one) in self._left_out]

    def of(self, modules: Sequence[Module]) -> Iterator[tuple[list[Module], InputStatistics]]:
        """Groups of ``modules`` that share an input, with its statistics, if there are any."""
        groups: dict[Module, list[Module]] = {}
        for module in modules:
            groups.setdefault(self._leaders[module], []).append(module)
        for leader, members in groups.items():
            if leader in self._found:
                yield members, self._found[leader]

    def drop(self, modules: Collection[Module]) -> None:
        """Free the statistics of ``modules``."""
        for module in modules:
            self._found.pop(self._leaders.get(module, module), None)

    def _has_few(self, module: Module) -> bool:
        place = self._places.get(module)
        if place is None or not place.is_shown_more:
            return False
        return place.policy is not None or place.tokens < self._widest[place.mixture, place.expert]

    def _has_room(self, leader: Module) -> bool:
        """Start statistics for a group, if they fit the memory budget."""
        weight_RC = weight_of(leader)
        widths = [weight_RC.shape[-1], *(weight_of(one).shape[-1] for one in self._found)]
        if leader in self._left_out or _FLOAT * sum(one**2 for one in widths) > _MOST:
            self._left_out.add(leader)
            return False
        name = self._places[leader].path
        self._found[leader] = InputStatistics(widths[0], weight_RC.device, name=name)
        return True
