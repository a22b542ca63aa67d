# SPDX-License-Identifier: Apache-2.0
"""What experts are shown that too few tokens are routed to.

Learning goes by what a block returns, and of an expert that are the tokens routed to it. Where
these are few, what is learned does little for others. Calibration shows such an expert more, and
that is counted here, to solve it for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.call_order import CallOrder
from llmcompressor.modeling.expert_places import ExpertPlace
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.quantization.parameters import weight_of

__all__ = ["ShownInputs"]


class ShownInputs:
    """Second moments of what experts with few tokens are shown.

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
        self._widest: dict[tuple[Module, int], int] = {}
        for module, place in places.items():
            expert, columns = (place.mixture, place.expert), weight_of(module).shape[-1]
            self._widest[expert] = max(columns, self._widest.get(expert, 0))

    @property
    def leaders(self) -> Sequence[Module]:
        """One of the Linears with each input."""
        return list(self._groups)

    def is_few(self, module: Module) -> bool:
        """Whether a Linear's expert got too few tokens so far, and is shown more.

        It is starved, or has fewer than its widest Linear has columns.
        """
        place = self._places.get(module)
        if place is None or not place.is_shown_more:
            return False
        return place.policy is not None or place.tokens < self._widest[place.mixture, place.expert]

    def add(self, leader: Module, input_TC: Tensor) -> None:
        """Count what a group gets, as long as one of its experts has few tokens.

        Args:
            leader: one of :attr:`leaders`.
            input_TC: real tokens, ``[T, C]``.
        """
        if not any(map(self.is_few, self._groups[leader])):
            self._found.pop(leader, None)
            return
        if leader not in self._found:
            columns, device = input_TC.shape[-1], weight_of(leader).device
            place = self._places[leader]
            self._found[leader] = InputStatistics(columns, device, name=place.path)
        self._found[leader].update(input_TC)

    def of(self, modules: Sequence[Module]) -> Iterator[tuple[list[Module], InputStatistics]]:
        """Those of ``modules`` with one input, and its statistics, where there are any."""
        groups: dict[Module, list[Module]] = {}
        for module in modules:
            groups.setdefault(self._leaders[module], []).append(module)
        for leader, members in groups.items():
            if leader in self._found:
                yield members, self._found[leader]

    def drop(self, modules: Sequence[Module]) -> None:
        """Forget what ``modules`` were shown."""
        for module in modules:
            self._found.pop(self._leaders.get(module, module), None)
