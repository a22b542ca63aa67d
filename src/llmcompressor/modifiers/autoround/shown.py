# SPDX-License-Identifier: Apache-2.0
"""What experts are shown that too few tokens are routed to.

Learning goes by what a block returns, and of an expert that are the tokens routed to it. Where
these are few, what is learned does little for others. Calibration shows such an expert more, and
that is counted here, to solve it for.
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
    """What the second moments of one of an expert's inputs take at most, beside the others'.

    >>> shown_bytes(1024, 8), shown_bytes(7168, 256)
    (4194304, 8388608)
    """
    return min(_FLOAT * columns**2, _MOST // (_INPUTS * experts))


class ShownInputs:
    """Second moments of what experts with few tokens are shown.

    Few are fewer than the widest Linear of an expert has columns, or too few by the policy for
    starved experts. As tokens come, those are dropped that turn out to have enough.

    Args:
        places: where the Linears of experts stand.
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
        """One of the Linears with each input."""
        return list(self._groups)

    def add(self, leader: Module, input_TC: Tensor) -> None:
        """Count what a group gets, as long as one of its experts has few tokens.

        Args:
            leader: one of :attr:`leaders`.
            input_TC: real tokens, ``[T, C]``.
        """
        if not any(map(self._has_few, self._groups[leader])):
            self._found.pop(leader, None)
        elif leader in self._found or self._has_room(leader):
            self._found[leader].update(input_TC)

    def held(self, modules: Collection[Module]) -> list[Module]:
        """Those of ``modules`` that are not to be learned.

        That is a starved expert in any case, another with few tokens where there is what it was
        shown.
        """
        return [
            one
            for one in modules
            if self._has_few(one)
            and (self._places[one].policy is not None or self._leaders[one] in self._found)
        ]

    def without_room(self, modules: Collection[Module]) -> list[Module]:
        """Those of ``modules`` whose statistics were left out, as all would take too much."""
        return [one for one in modules if self._leaders.get(one) in self._left_out]

    def of(self, modules: Sequence[Module]) -> Iterator[tuple[list[Module], InputStatistics]]:
        """Those of ``modules`` with one input, and its statistics, where there are any."""
        groups: dict[Module, list[Module]] = {}
        for module in modules:
            groups.setdefault(self._leaders[module], []).append(module)
        for leader, members in groups.items():
            if leader in self._found:
                yield members, self._found[leader]

    def drop(self, modules: Collection[Module]) -> None:
        """Forget what ``modules`` were shown."""
        for module in modules:
            self._found.pop(self._leaders.get(module, module), None)

    def _has_few(self, module: Module) -> bool:
        place = self._places.get(module)
        if place is None or not place.is_shown_more:
            return False
        return place.policy is not None or place.tokens < self._widest[place.mixture, place.expert]

    def _has_room(self, leader: Module) -> bool:
        """Begin to count for a group, if that is not too much beside the others."""
        weight_RC = weight_of(leader)
        widths = [weight_RC.shape[-1], *(weight_of(one).shape[-1] for one in self._found)]
        if leader in self._left_out or _FLOAT * sum(one**2 for one in widths) > _MOST:
            self._left_out.add(leader)
            return False
        name = self._places[leader].path
        self._found[leader] = InputStatistics(widths[0], weight_RC.device, name=name)
        return True
