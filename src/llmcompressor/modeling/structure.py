# SPDX-License-Identifier: Apache-2.0
"""Channel links in a block: whose output channels are whose input channels, found by a run.

A norm feeds the Linears that get its output tensor: that is seen. The output of ``up_proj``
reaches ``down_proj`` multiplied by the gate's, that of ``v_proj`` reaches ``o_proj`` averaged
over positions: that is tried. A block is run on a few random states with stand-in weights, then
again with the outputs of a candidate divided and the inputs of its readers multiplied by powers
of two; a candidate is right if that leaves the block's output as it was. So nothing has to be
known of an architecture, no weight is read, and a module that feeds more than it seems to (a
second branch, an expert that is not named) is never taken.

A router whose weight is ``[experts, C]`` takes scales as a Linear does: the norm before an MoE
feeds it and the first Linears of the experts. All experts of an MoE get a link or none; two of them
are run (:mod:`llmcompressor.modeling.alike_experts`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.modeling.alike_experts import AlikeExperts
from llmcompressor.modeling.block_runs import BlockRun, BlockRuns, Call, place_of
from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.modeling.scaling import (
    columns_of,
    divided_outputs,
    multiplied_inputs,
    norm_offset,
)

__all__ = ["BlockProbe", "Link", "Outcome", "Verdict"]

_INVARIANT = 1e-4
"""Relative change of a block's float32 output that is taken for rounding; others are near one."""


@dataclass(frozen=True)
class Link:
    """A smooth module and the modules that read its output, by their names within a block.

    Attributes:
        smooth: the norm or Linear whose output channels are divided.
        balance: the Linears, and routers, whose input channels are multiplied; all that read
            that output.
        offset: what the norm adds to its weight.
    """

    smooth: str
    balance: tuple[str, ...]
    offset: float = 0.0


class Outcome(Enum):
    """The outcome of validating named modules."""

    HOLDS = "the block's output stays as it was"
    CHANGES = "the block's output changes"
    SHARES = "several columns of the readers read one row"
    UNTRIED = "nothing was seen of one of them, or the block did not run"


@dataclass(frozen=True)
class Verdict:
    """The result of validating named modules.

    Attributes:
        outcome: whether they are a link.
        offset: if so, what the norm adds to its weight; 0 for a Linear.
        others: modules that seem to read the output too, or that were not called; names
            within the block.
        rows: how many rows several columns share.
    """

    outcome: Outcome
    offset: float = 0.0
    others: tuple[str, ...] = ()
    rows: int = 0


@dataclass
class _Group:
    """The modules that get one tensor: those that take scales, and MoEs."""

    takers: list[Call] = field(default_factory=list)
    mixtures: list[Call] = field(default_factory=list)

    @property
    def first(self) -> Call:
        return (self.takers or self.mixtures)[0]


class BlockProbe:
    """Finds and validates the channel links of one block.

    Args:
        block: the block; its own weights are neither read nor changed.
        args: how the model calls it.
        kwargs: the same, by name.
    """

    def __init__(self, block: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._runs = BlockRuns(block, args, kwargs)
        self._experts = AlikeExperts(self._runs.modules)
        self._known: dict[tuple[str, ...], Verdict] = {}

    def find(self, *, norms_only: bool = False, mixtures: bool = True) -> list[Link]:
        """Every link of the block, in the order of the first reader's call.

        Args:
            norms_only: leave out those that begin with a Linear.
            mixtures: also those from a module to the first Linears of the experts of an MoE. One
                that feeds attention as well, in a parallel block, is found in any case.
        """
        links: list[Link] = []
        searched: set[tuple[str, ...]] = set()
        with self._runs.running():
            run = self._runs.watch()
            for group in _groups(run):
                key = tuple(self._experts.alike(group.first.name))
                if key in searched:
                    continue
                searched.add(key)
                if link := self._link_of(group, run, norms_only=norms_only, mixtures=mixtures):
                    links.append(link)
        return list(dict.fromkeys(copy for link in links for copy in self._in_all_experts(link)))

    def verify(self, smooth: str, balance: Sequence[str]) -> Verdict:
        """Validate that scaling named modules leaves the block's output unchanged.

        A module of one expert has to be named in all of them, unless all named modules are one
        expert's own. Experts of equal structure represent each other.
        """
        places = [(smooth, *balance)]
        if self._experts.inside_one(places[0]):
            places = self._experts.copies(places[0])
        elif left_out := self._experts.left_out(balance):
            return Verdict(Outcome.CHANGES, others=(left_out,))
        if places[0] not in self._known:
            self._known[places[0]] = self._tried_out(places)
        return self._known[places[0]]

    def _tried_out(self, places: Sequence[tuple[str, ...]]) -> Verdict:
        """The verdict on the first of several equivalent places whose modules were all called."""
        with self._runs.running():
            run = self._runs.watch()
            if run.failed:
                return Verdict(Outcome.UNTRIED)
            called = {call.name for call in run.leaves}
            names = next((one for one in places if not self._unseen(one, called)), None)
            if names is None:
                return Verdict(Outcome.UNTRIED, others=tuple(self._unseen(places[0], called)[:1]))
            own = next(call for call in run.leaves if call.name == names[0])
            readers = [call for call in run.leaves if call.name in set(names[1:])]
            if link := self._tried(own, readers, run):
                return Verdict(Outcome.HOLDS, link.offset)
            if rows := self._shared_rows(own, readers, run):
                return Verdict(Outcome.SHARES, rows=rows)
            return Verdict(Outcome.CHANGES, others=self._also_given(own, names, run))

    def _unseen(self, names: Sequence[str], called: Collection[str]) -> list[str]:
        """Names of modules that were neither called nor represented by another named module."""
        if self._experts.inside_one(names):
            return [name for name in names if name not in called]
        seen = {other for name in names if name in called for other in self._experts.alike(name)}
        return [name for name in names if name not in seen]

    def _in_all_experts(self, link: Link) -> Iterator[Link]:
        """Repeat a link within one expert for every expert; extend others to all experts."""
        names = (link.smooth, *link.balance)
        if self._experts.inside_one(names):
            for copy in self._experts.copies(names):
                yield Link(copy[0], copy[1:], link.offset)
            return
        every = [other for name in link.balance for other in self._experts.alike(name)]
        if self._experts.left_out(every) is None:
            yield Link(link.smooth, tuple(dict.fromkeys(every)), link.offset)

    def _link_of(
        self, group: _Group, run: BlockRun, *, norms_only: bool, mixtures: bool
    ) -> Link | None:
        """The link that ends in the modules of a group."""
        for source in self._sources(group, run):
            if norms_only and isinstance(source.module, Linear):
                continue
            is_direct = place_of(source.output) == place_of(group.first.input)
            into = is_direct and (mixtures or self._feeds_beside(group))
            for readers in self._readers(group, run, mixtures=into):
                if link := self._tried(source, readers, run):
                    return link
        return None

    def _feeds_beside(self, group: _Group) -> bool:
        """Return True if the tensor of an MoE also feeds modules outside of the MoE block."""
        parts = filter(None, (self._experts.part_of(call.name) for call in group.takers))
        experts = {call.name for call in group.mixtures} | {part.experts for part in parts}
        homes = {name.rpartition(".")[0] for name in experts}
        return any(
            home and not call.name.startswith(f"{home}.") for home in homes for call in group.takers
        )

    def _sources(self, group: _Group, run: BlockRun) -> list[Call]:
        """Candidates that may feed a group: by tensor, else the Linears that ran before it."""
        key = place_of(group.first.input)
        if sources := [call for call in run.leaves if place_of(call.output) == key]:
            return sources
        if not group.takers:
            return []
        begin = run.leaves.index(group.takers[0])
        place = self._experts.expert_of(group.takers[0].name)
        return [
            call
            for call in reversed(run.leaves[:begin])
            if isinstance(call.module, Linear) and self._experts.expert_of(call.name) == place
        ]

    def _readers(self, group: _Group, run: BlockRun, *, mixtures: bool) -> Iterator[list[Call]]:
        """Candidate readers of a group's tensor: the modules that get it, alone or with experts.

        Rows that are ordered by expert and weighted are another tensor than the norm's output; an
        MoE of the block may read it then, too.
        """
        within = [self._experts.expert_of(call.name) is not None for call in group.takers]
        if group.takers and not group.mixtures and (mixtures or all(within) or not any(within)):
            yield group.takers
        if not mixtures or any(within):
            return
        entrances = {
            mixture.linear(expert, role)
            for call in group.mixtures or run.mixtures
            if isinstance(mixture := call.module, LinearExperts)
            for expert in range(mixture.num_experts)
            for role in mixture.entrances
        }
        if found := [call for call in run.leaves if call.module in entrances]:
            yield [*group.takers, *found]

    def _tried(self, source: Call, readers: Sequence[Call], run: BlockRun) -> Link | None:
        """Scale a candidate, and verify that the block's output is unchanged."""
        columns = columns_of(readers[0].module)
        if columns is None or any(columns_of(one.module) != columns for one in readers):
            return None
        offset = 0.0
        if isinstance(source.module, Linear):
            if source.module.out_features < columns:
                return None  # grouped heads: several columns read one row
        else:
            found = norm_offset(source.module, source.args, source.kwargs)
            weight = source.module._parameters.get("weight")
            if found is None or weight is None or len(weight) != columns:
                return None
            offset = found
        exponents = torch.randint(-1, 2, (columns,), generator=self._runs.generator)
        scale_C = torch.exp2(exponents.float()).to(self._runs.device)
        if not self._leaves_output(source, readers, run, (scale_C, scale_C, offset)):
            return None
        names = dict.fromkeys(reader.name for reader in readers)
        return Link(source.name, tuple(names), offset)

    def _also_given(self, source: Call, names: Collection[str], run: BlockRun) -> tuple[str, ...]:
        """Modules that get the output of ``source`` and are not among ``names``."""
        key = place_of(source.output)
        given = [call for call in (*run.leaves, *run.mixtures) if place_of(call.input) == key]
        parts = {part.experts for part in map(self._experts.part_of, names) if part is not None}
        others = [call.name for call in given if call.name not in names]
        return tuple(one for one in others if key and one not in parts)

    def _shared_rows(self, source: Call, readers: Sequence[Call], run: BlockRun) -> int:
        """Number of rows of a fused Linear that all columns of its readers share; 0 if none.

        With grouped heads these are the last rows, after as many rows for the keys: one scale for
        all of them is tried.
        """
        columns = columns_of(readers[0].module)
        if columns is None or not isinstance(source.module, Linear):
            return 0
        rows, odd = divmod(source.module.out_features - columns, 2)
        if odd or not 0 < rows < columns or columns % rows:
            return 0
        two_C = torch.full((columns,), 2.0, device=self._runs.device)
        found = self._leaves_output(source, readers, run, (two_C[:rows], two_C, 0.0))
        return rows if found else 0

    def _leaves_output(
        self,
        source: Call,
        readers: Sequence[Call],
        run: BlockRun,
        scales: tuple[Tensor, Tensor, float],
    ) -> bool:
        """Return True if divided outputs cancel multiplied inputs, which alone matter.

        Args:
            source: the call of the module whose outputs are divided.
            readers: calls of the modules whose inputs are multiplied.
            run: of the unmodified block.
            scales: of the outputs, of the inputs, and the norm's offset.
        """
        divisor_R, factor_C, offset = scales
        modules = {reader.module for reader in readers}
        if source.module in modules:
            return False
        inputs = {module: multiplied_inputs(module, factor_C) for module in modules}
        outputs = {source.module: divided_outputs(source.module, divisor_R, offset)}
        matters = self._runs.change(run.output, inputs) > _INVARIANT
        return matters and self._runs.change(run.output, {**inputs, **outputs}) <= _INVARIANT


def _groups(run: BlockRun) -> Iterator[_Group]:
    """Group calls by the tensor that they get, in the order of the first call."""
    groups: dict[tuple[int, int] | None, _Group] = {}
    for call in run.leaves:
        if call.takes_scales:
            groups.setdefault(place_of(call.input), _Group()).takers.append(call)
    for call in run.mixtures:
        groups.setdefault(place_of(call.input), _Group()).mixtures.append(call)
    yield from groups.values()
