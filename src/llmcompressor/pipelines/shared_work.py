# SPDX-License-Identifier: Apache-2.0
"""The work of a pass, shared by ranks: each runs a part of the samples, and owns some modules.

At a stop all ranks wait for each other, with their passes at the same module::

    rank 0                        rank 1
    runs samples 0, 2, 4, …       runs samples 1, 3, 5, …
    sends its statistics      →   adds them in the order of the ranks
                                  compresses the module, which it owns
    gets the new weight       ←   sends it
    runs it on its samples        runs it on its samples

Modules that share an input have one owner. Every rank computes the owners itself, from the costs
that modifiers declare, so that they are nowhere sent. A single rank owns all, and no sum changes
anything.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.core.contract import DataSize, Edits, Solving, Traits
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.runtime.collectives import Ranks, least_loaded
from llmcompressor.runtime.run_record import EXCHANGE, phase

_STATUS = "quantization_status"
_RAW = "frozen"
_CHANGED_AT_STOPS = frozenset({"weight", "bias"})


class SharedWork:
    """The part of this rank in a pass, and what it exchanges with the others.

    Args:
        state: of the run, with its ranks.
        modifiers: of the pass.

    Attributes:
        ranks: the ranks of the run.
    """

    def __init__(self, state: State, modifiers: Sequence[Modifier]) -> None:
        self.ranks = state.run.ranks or Ranks()
        self._state, self._modifiers = state, modifiers
        self._owners: dict[Module, int | None] = {}
        self._costs: dict[Module, int] = {}
        """Of the groups of this rank, by the first module."""
        self._is_shared = self.ranks.count > 1
        shared = [one.traits for one in modifiers if one.traits.over_ranks is not Solving.ALONE]
        by_owner = [one for one in shared if one.over_ranks is Solving.OWNER]
        self._changes_at_stops = any(map(_changes_weights_at_stops, shared))
        self._changes_later = not all(map(_changes_weights_at_stops, by_owner))

    def assign(self, stops: Iterable[Mapping[str, Sequence[Module]]]) -> None:
        """Give each group, the most costly first, to the rank with the least to do.

        Where a stop has fewer groups than there are ranks, these solve each of its groups together
        if the modifiers can divide it.

        Args:
            stops: for each stop the modules that are compressed together, by a name of their own.
                Modules in none belong to the first rank.
        """
        if not self._is_shared:
            return
        members: dict[str, Sequence[Module]] = {}
        costs: dict[str, int] = {}
        self._state.run.divided = set()
        for groups in stops:
            costs |= {name: self._cost(own) for name, own in groups.items()}
            inside = [module for own in groups.values() for module in own]
            if len(groups) < self.ranks.count and self._is_divisible(inside):
                self._state.run.divided.update(inside)
                self._owners.update(dict.fromkeys(inside))
                parts = {own[0]: costs[name] // self.ranks.count for name, own in groups.items()}
                self._costs.update(parts)
            else:
                members.update(groups)
        found = least_loaded([(name, costs[name]) for name in members], self.ranks.count)
        for name, owner in zip(members, found, strict=True):
            self._owners.update(dict.fromkeys(members[name], owner))
            if owner == self.ranks.rank:
                self._costs[members[name][0]] = costs[name]

    def _is_divisible(self, modules: Iterable[Module]) -> bool:
        given = set(modules)
        solving = [one for one in self._modifiers if one.traits.over_ranks is Solving.OWNER]
        return all(
            one.traits.divides_rows or given.isdisjoint(one.select(self._state).modules)
            for one in solving
        )

    def _cost(self, members: Sequence[Module]) -> int:
        """Multiply-adds to compress a group, whose statistics are there."""
        found = 0
        for modifier in self._modifiers:
            own = set(modifier.select(self._state).modules)
            mine = [one for one in members if one in own]
            found += modifier.cost(mine, DataSize()).flops if mine else 0
        sizes = (one.numel() for module in members for one in module.parameters(recurse=False))
        return found + sum(sizes) + 1

    def owner_of(self, module: Module) -> int | None:
        """The rank that compresses a module; ``None``: all of them do so together."""
        return self._owners.get(module, 0)

    def own(self, modules: Iterable[Module]) -> tuple[Module, ...]:
        """Those of ``modules`` that this rank compresses, alone or together with others."""
        return tuple(one for one in modules if self.owner_of(one) in (None, self.ranks.rank))

    def solved_here(self, modifier: Modifier, modules: Sequence[Module]) -> Sequence[Module]:
        """Those of ``modules`` that a modifier works on in this rank."""
        is_for_owners = modifier.traits.over_ranks is Solving.OWNER
        return self.own(modules) if is_for_owners else modules

    def others(self, modules: Iterable[Module]) -> tuple[Module, ...]:
        """Those of ``modules`` that other ranks compress."""
        return tuple(one for one in modules if self.owner_of(one) not in (None, self.ranks.rank))

    # ------------------------------------------------------------------ agreements

    def least(self, value: int, what: str) -> int:
        """The least value of all ranks."""
        return int(self.ranks.min_all(torch.tensor(value), what=what))

    def most(self, value: int, what: str) -> int:
        """The greatest value of all ranks."""
        return int(self.ranks.max_all(torch.tensor(value), what=what))

    def common(self, names: Iterable[str], every: Sequence[str], what: str) -> list[str]:
        """The names that all ranks have given, in the order of ``every``."""
        given = set(names)
        if not self._is_shared:
            return [one for one in every if one in given]
        flags = torch.tensor([one in given for one in every])
        found = self.ranks.min_all(flags, what=what).tolist()
        return [one for one, is_common in zip(every, found, strict=True) if is_common]

    # ------------------------------------------------------------------ tensors

    def sum_collected(self, modules: Sequence[Module]) -> None:
        """Add what all ranks have collected of the inputs of ``modules``, for their owners."""
        self.ranks.tally["solved"] += sum(self._costs.get(one, 0) for one in modules)
        if self._is_shared:
            with phase(EXCHANGE):
                for modifier in self._modifiers:
                    modifier.sum_collected(self._state, self.ranks, modules, self.owner_of)

    def sum_observed(self, modules: Sequence[Module]) -> None:
        """Add what all ranks have observed of ``modules``, which all samples have left."""
        if self._is_shared:
            with phase(EXCHANGE):
                for modifier in self._modifiers:
                    modifier.sum_observed(self._state, self.ranks, modules)

    def copy_compressed(self, modules: Sequence[Module], name: str) -> None:
        """Give all ranks the weights that the owners have compressed at a stop."""
        if not self._is_shared or not self._changes_at_stops:
            return
        own = [one for one in dict.fromkeys(modules) if self._owners.get(one) is not None]
        self._copy(own, f"weights of {name}")

    def copy_finished(self, modules: Sequence[Module], name: str) -> None:
        """Give all ranks what the owners have added to modules that are finished.

        Weights stay where all ranks have them: where the writer will round them, and where nothing
        has changed them since the stop.

        Args:
            modules: those of a block, or all outside of blocks.
            name: name of the block, for errors.
        """
        if not self._is_shared:
            return
        compressed = (one for one in modules if one in self._owners or hasattr(one, _STATUS))
        sent = [one for one in compressed if self.owner_of(one) is not None]
        self._copy_statuses(sent, f"states of {name}")
        known = {one for one in sent if not self._changes_later or _is_raw(one)}
        self._copy(sent, f"parameters of {name}", known=known)

    def _copy_statuses(self, modules: Sequence[Module], what: str) -> None:
        """Whether weights are rounded already, which the writer has to know."""
        own = {
            str(place): getattr(one, _STATUS).value
            for place, one in enumerate(modules)
            if self.owner_of(one) == self.ranks.rank and hasattr(one, _STATUS)
        }
        for found in self.ranks.exchange(own, what=what):
            for place, value in found.items():
                known = getattr(modules[int(place)], _STATUS)
                setattr(modules[int(place)], _STATUS, type(known)(value))

    def _copy(self, modules: Sequence[Module], what: str, *, known: Container[Module] = ()) -> None:
        """Copy the tensors that modules hold themselves, but for weights that are ``known``."""
        with phase(EXCHANGE):
            for owner in range(self.ranks.count):
                mine = [one for one in modules if self.owner_of(one) == owner]
                if mine:
                    is_own = owner == self.ranks.rank
                    tensors = dict(_tensors_of(mine, known)) if is_own else {}
                    found = self.ranks.broadcast_from(owner, tensors, what=what)
                    if not is_own:
                        _put(mine, found)


def _changes_weights_at_stops(traits: Traits) -> bool:
    """Return True if other ranks need weights at once; parts are removed on all of them."""
    edits = traits.edits
    return traits.needs_data and Edits.AT_ONCE in edits and Edits.STRUCTURE not in edits


def _is_raw(module: Module) -> bool:
    """Return True if the weight is as it was, and will be rounded when it is written."""
    return getattr(getattr(module, _STATUS, None), "value", "") == _RAW


def _tensors_of(
    modules: Sequence[Module], known: Container[Module]
) -> Iterator[tuple[str, Tensor]]:
    for place, module in enumerate(modules):
        but = _CHANGED_AT_STOPS if module in known else ()
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and name not in but and not tensor.is_meta:
                    yield f"{place}.{name}", tensor.detach()


@torch.no_grad()
def _put(modules: Sequence[Module], tensors: Mapping[str, Tensor]) -> None:
    """Give modules the tensors that :func:`_tensors_of` has named; parameters stay the same."""
    for key, tensor in tensors.items():
        place, _, name = key.partition(".")
        module = modules[int(place)]
        known = module._parameters.get(name)
        if name in module._buffers:
            module._buffers[name] = tensor.to(_device_of(module))
        elif known is not None and not known.is_meta and known.shape == tensor.shape:
            known.data = tensor.to(known.device)
        else:
            module._parameters[name] = Parameter(tensor.to(_device_of(module)), requires_grad=False)


def _device_of(module: Module) -> torch.device:
    held = (one for one in module.parameters() if not one.is_meta)
    return next((one.device for one in held), torch.device("cpu"))
