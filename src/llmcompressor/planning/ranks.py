# SPDX-License-Identifier: Apache-2.0
"""Cost of a run on several ranks: work, bytes, memory and time of each.

A rank runs its share of the calibration batches. At a stop the statistics of each group of modules
are summed at the rank that owns the group (reduce); the owner solves it and sends the result to all
(broadcast). The letters are P for the ranks, L for the ranks of a node, N for the nodes, and for a
group S for the bytes of its statistics and W for those of its solved tensors in memory. What all
ranks work on (``Solving.ALL``) has statistics of A bytes, which are summed at all of them. So are
those of a group that ranks solve together, each a part of the rows, as its stop has fewer groups
than there are ranks (``Traits.divides_rows``); then each sends its part of W to the others.

=========  ==============================  ===============================  ===========
           a rank sends                    a rank receives                  all send
=========  ==============================  ===============================  ===========
reduce     S of each group of others       (P - 1) S of each group it owns  (P - 1) Σ S
to all     2 A (P - 1) / P                 the same                         2 (P - 1) Σ A
broadcast  W to each child in a group's    W of each group of others        (P - 1) Σ W
           tree
=========  ==============================  ===============================  ===========

The time is that of the rank that takes longest, stop by stop. Groups of a stop travel one after
another, as operations of :class:`.Ranks` do, and are solved by their owners at the same time.

=========  =====================================================================================
calibrate  forwards of the largest share of the batches
solve      statistics of that share; Σ over stops of the most that one rank solves; and what
           each rank does by itself, which is all that needs no data
reduce     Σ max((L - 1) S / within, (P - L) S / between), which an owner receives; and to all
           Σ 2 A max((L - 1) / within, L (P - L) / between) / P
broadcast  Σ W Σ over the ⌈log₂ P⌉ levels of the tree of max(1 / within, K / between), where K
           copies at most enter or leave a node
learn      as of one rank
load       as of one rank: each node reads all weights, and the nodes do so at the same time
save       rounding and packing of the largest share; the disk is as fast as for one rank
=========  =====================================================================================

Each rank chooses where its forwards pause by the tokens of its own share, as the run does, so that
the stops may differ with the number of ranks. A module is written by another rank than solves it:
modules and tensors are spread over ranks by their bytes in the files.

Not counted: what ranks that solve a group together do alike, as the factorization of its Gram
matrix; records by which ranks compare what they do, ranges of static scales, copies between
main memory and an accelerator, and what else uses the links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil

from llmcompressor.errors import ArgumentError
from llmcompressor.planning.memory import PartMemory, RunMemory, estimate_phases
from llmcompressor.planning.passes import Passes
from llmcompressor.planning.result import (
    Links,
    Operations,
    RankCount,
    RankLoad,
    RankPlan,
    Rates,
)
from llmcompressor.planning.workload import BlockWork, GroupShare, Stop, Traffic, estimate_time
from llmcompressor.runtime.collectives import PANEL, least_loaded, tree_children

WITHIN = {"cuda": 50.0, "cpu": 0.5}
BETWEEN = {"cuda": 12.5, "cpu": 1.25}
"""Speed of links by default in 10⁹ bytes per second, by type of device: of one rank to others of
its node, and into or out of a node. For ``cuda`` links between devices of which a collective gets
what older NVLink gives at least, and a network of 100 Gb/s; for ``cpu`` gloo through the loopback
as measured (0.4 for sums, 0.8 for copies), and a network of 10 Gb/s."""
_WORTH = 0.9
"""A doubling pays if the run then takes at most this share of the time."""
_PANELS = 2
"""Panels of tensors that a rank holds while it sends or receives: its own and those of others."""


@dataclass(frozen=True)
class Layout:
    """The ranks to plan for.

    Attributes:
        ranks: P, the number of ranks.
        nodes: N, the number of machines they are on, as many on each.
        link_speed: of a rank to others of its node, in 10⁹ bytes per second; by default that of
            :data:`WITHIN`.
        node_link_speed: into and out of a node; by default that of :data:`BETWEEN`.

    Raises:
        ArgumentError: they do not go together.
    """

    ranks: int = 1
    nodes: int = 1
    link_speed: float | None = None
    node_link_speed: float | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that are not positive, and nodes with different numbers of ranks."""
        for name in ("ranks", "nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(
                    f"{name} is {value!r}, and not a whole number of at least 1.",
                    f"Give the number of {name}, as {name}=2.",
                )
        for name in ("link_speed", "node_link_speed"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ArgumentError(
                    f"{name} is {value!r}, and not a positive number.",
                    "Give it in gigabytes (10⁹) per second, as 12.5 for 100 Gb/s.",
                )
        if self.ranks % self.nodes:
            raise ArgumentError(
                f"nodes is {self.nodes}, which does not divide {self.ranks} ranks.",
                "Every node has the same number of ranks: give a multiple of nodes as ranks.",
            )

    def links(self, device: str) -> Links:
        """The speed of the links, of this type of device where none was given."""
        within = self.link_speed or WITHIN.get(device, WITHIN["cuda"])
        between = self.node_link_speed or BETWEEN.get(device, BETWEEN["cuda"])
        return Links(within * 1e9, between * 1e9)

    def check_batches(self, batches: int) -> None:
        """Refuse more ranks than there are calibration batches.

        Raises:
            ArgumentError: some ranks would have none.
        """
        if batches < self.ranks:
            raise ArgumentError(
                f"{self.ranks} ranks are to share {batches} calibration batches.",
                "Plan for as many ranks as there are batches at most, or give more samples.",
            )

    def counts(self) -> list[int]:
        """1, 2, 4 and so on, and last the number of ranks."""
        doubled = [1 << power for power in range(self.ranks.bit_length())]
        return sorted({*doubled, self.ranks})

    def nodes_of(self, ranks: int) -> int:
        """Number of nodes that so many of the ranks fill, one after another."""
        return -(-ranks * self.nodes // self.ranks)


@dataclass(frozen=True)
class OwnedGroup:
    """A group of modules that one rank solves.

    Attributes:
        name: of its stop, and its number there.
        solving: multiply-adds of its owner.
        summed: S, bytes of its statistics as a rank sends them.
        spread: A, the same of statistics that all ranks need.
        repeated: multiply-adds of every rank.
        copied: W, bytes of its solved tensors as they are in memory.
        divides: ranks may solve it together, each a part of the rows.
    """

    name: str
    solving: int = 0
    summed: int = 0
    copied: int = 0
    spread: int = 0
    repeated: int = 0
    divides: bool = False


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """Work of a run, before it is divided.

    Attributes:
        stops: the groups of each stop, in the order of the run.
        batches: number of calibration batches.
        operations: of one rank that does all.
        statistics: those multiply-adds among them that each rank does for its batches.
        steps: number of batches at all stops.
        traffic: of one rank that does all.
        stored: what is packed and written at once → its bytes in the files.
    """

    stops: Sequence[Sequence[OwnedGroup]]
    batches: int
    operations: Operations
    statistics: int
    steps: int
    traffic: Traffic
    stored: Mapping[str, int]

    @property
    def groups(self) -> list[OwnedGroup]:
        """All groups in the order of the run."""
        return [group for stop in self.stops for group in stop]

    def is_together(self, stop: Sequence[OwnedGroup], ranks: int) -> bool:
        """Return True if ranks solve the groups of a stop together, as it has too few of them."""
        return len(stop) < ranks and all(group.divides for group in stop)

    def owned(self, ranks: int) -> list[OwnedGroup]:
        """The groups that have an owner each."""
        stops = (stop for stop in self.stops if not self.is_together(stop, ranks))
        return [group for stop in stops for group in stop]

    def together(self, ranks: int) -> list[OwnedGroup]:
        """The groups that ranks solve together."""
        stops = (stop for stop in self.stops if self.is_together(stop, ranks))
        return [group for stop in stops for group in stop]

    def spread(self, ranks: int) -> int:
        """Bytes of the statistics that are summed at all ranks."""
        together = sum(group.summed for group in self.together(ranks))
        return sum(group.spread for group in self.groups) + together

    def share(self, ranks: int) -> float:
        """The largest share of the batches that a rank has; all of them without data."""
        return -(-self.batches // ranks) / self.batches if self.batches else 1.0


# --------------------
# Division of the work.


def owners(groups: Sequence[OwnedGroup], ranks: int) -> list[int]:
    """The rank that solves each group."""
    return least_loaded([(group.name, max(1, group.solving)) for group in groups], ranks)


def divided(total: int, parts: Sequence[int]) -> list[int]:
    """Divide a total as the parts divide their sum; evenly if that is 0.

    >>> divided(10, [1, 1, 1])
    [3, 3, 4]
    """
    parts = parts if any(parts) else [1] * len(parts)
    ends = [total * end // sum(parts) for end in accumulate(parts, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def rank_loads(work: RankWork, ranks: int) -> list[RankLoad]:
    """What each rank does, sends and receives."""
    batches = [len(range(rank, work.batches, ranks)) for rank in range(ranks)]
    forward = divided(work.operations.forward, batches)
    statistics = divided(work.statistics, batches)
    owned: list[list[OwnedGroup]] = [[] for _ in range(ranks)]
    alone, together = work.owned(ranks), work.together(ranks)
    for rank, group in zip(owners(alone, ranks), alone, strict=True):
        owned[rank].append(group)
    summed = [sum(group.summed for group in own) for own in owned]
    parts = divided(sum(group.copied for group in together), [1] * ranks)
    copied = [sum(group.copied for group in own) + parts[rank] for rank, own in enumerate(owned)]
    solved = divided(sum(group.solving for group in together), [1] * ranks)
    spread = 2 * work.spread(ranks) * (ranks - 1) // ranks
    written = [0] * ranks
    for rank, size in zip(
        least_loaded([*work.stored.items()], ranks), work.stored.values(), strict=True
    ):
        written[rank] += size
    written[0] += work.traffic.written - sum(written)  # headers of the files
    return [
        RankLoad(
            rank,
            batches[rank],
            forward[rank] + statistics[rank],
            sum(group.solving for group in own) + solved[rank],
            written[rank],
            reduce_sent=sum(summed) - summed[rank] + spread,
            reduce_received=(ranks - 1) * summed[rank] + spread,
            broadcast_sent=sum(
                tree_children((rank - owner) % ranks, ranks) * size
                for owner, size in enumerate(copied)
            ),
            broadcast_received=sum(copied) - copied[rank],
        )
        for rank, own in enumerate(owned)
    ]


# --------------------
# Time.


def rank_seconds(
    work: RankWork, loads: Sequence[RankLoad], nodes: int, rates: Rates, links: Links
) -> dict[str, float]:
    """Seconds of each phase; of one rank those of the plan.

    Args:
        work: the work.
        loads: of all ranks.
        nodes: number of machines that they are on.
        rates: of each rank.
        links: between them.
    """
    ranks, one = len(loads), work.operations
    share = work.share(ranks)
    solving = sum(group.solving for group in work.groups)
    by_itself = one.solve - work.statistics - solving
    packing = max(load.written for load in loads) / max(work.traffic.written, 1)
    operations = Operations(
        forward=round(one.forward * share),
        solve=round(work.statistics * share) + _longest_solving(work, ranks) + by_itself,
        learn=one.learn,
    )
    traffic = replace(work.traffic, rounding=work.traffic.rounding * packing)
    travelling = wire_seconds(work, ranks, nodes, links)
    return estimate_time(rates, operations, round(work.steps * share), traffic, travelling)[0]


def _longest_solving(work: RankWork, ranks: int) -> int:
    """Multiply-adds of solving that follow each other."""
    owner, total = iter(owners(work.owned(ranks), ranks)), 0
    for stop in work.stops:
        if work.is_together(stop, ranks):
            total += -(-sum(group.solving for group in stop) // ranks)
            continue
        own = [0] * ranks
        for group in stop:
            own[next(owner)] += group.solving
        total += max(own)
    return total


def wire_seconds(work: RankWork, ranks: int, nodes: int, links: Links) -> dict[str, float]:
    """Seconds of ``reduce`` and ``broadcast``; empty for one rank."""
    if ranks == 1:
        return {}
    local = -(-ranks // nodes)
    alone = work.owned(ranks)
    summed = sum(group.summed for group in alone)
    copied = divided(sum(group.copied for group in work.together(ranks)), [1] * ranks)
    for owner, group in zip(owners(alone, ranks), alone, strict=True):
        copied[owner] += group.copied
    received = max((local - 1) / links.within, (ranks - local) / links.between)
    spread = 2 * work.spread(ranks) / ranks
    exchanged = max((local - 1) / links.within, local * (ranks - local) / links.between)
    return {
        "reduce": summed * received + spread * exchanged,
        "broadcast": sum(
            size * broadcast_seconds(owner, ranks, local, links)
            for owner, size in enumerate(copied)
        ),
    }


def broadcast_seconds(owner: int, ranks: int, local: int, links: Links) -> float:
    """Seconds to copy a byte of one rank to all, level by level of the tree.

    Args:
        owner: the rank.
        ranks: number of ranks.
        local: number of them on a node.
        links: between them; those of a node share one link to the others.
    """
    seconds = 0.0
    for level in range((ranks - 1).bit_length()):
        senders = range(min(1 << level, ranks - (1 << level)))
        nodes = [
            tuple((place + owner) % ranks // local for place in (sender, sender + (1 << level)))
            for sender in senders
        ]
        crossing = [pair for pair in nodes if pair[0] != pair[1]]
        each_way = [Counter(pair[end] for pair in crossing).values() for end in (0, 1)]
        busiest = max((number for way in each_way for number in way), default=0)
        seconds += max((len(crossing) < len(nodes)) / links.within, busiest / links.between)
    return seconds


# --------------------
# The section of the plan.


@dataclass(frozen=True)
class RankRun:
    """The run on a number of ranks.

    Attributes:
        work: the work to divide.
        host: peak bytes in main memory of the rank with the most batches.
        device: the same on its accelerator.
    """

    work: RankWork
    host: int
    device: int


def peaks_of_rank(
    run: RunMemory, loads: Sequence[PartMemory], passes: Passes, share: float
) -> tuple[int, int]:
    """Peak bytes in main memory and on the device of a rank.

    Args:
        run: of one rank that does all.
        loads: of the parts of the model.
        passes: over the model, with the activations of this rank.
        share: its share of the batches.
    """
    tokens = ceil(run.tokens * share)
    own = replace(run, tokens=tokens, run_tokens=min(run.run_tokens, tokens))
    smaller = [(one, [_work_of_rank(each, share) for each in works]) for one, works in passes]
    phases = estimate_phases(own, loads, smaller, {})
    panels = 0 if share == 1 else _PANELS * PANEL
    host, device = max(one.host for one in phases), max(one.device for one in phases)
    return (host, device + panels) if run.on_device else (host + panels, device)


def _work_of_rank(work: BlockWork, share: float) -> BlockWork:
    """The same with less data kept."""

    def smaller(stop: Stop) -> Stop:
        own = stop.cost
        gone = own.peak_data_bytes - int(own.peak_data_bytes * share)
        cost = replace(
            own,
            data_bytes=int(own.data_bytes * share),
            peak_bytes=own.peak_bytes - gone,
            peak_data_bytes=own.peak_data_bytes - gone,
        )
        return replace(stop, cost=cost)

    return replace(work, stops=[smaller(stop) for stop in work.stops])


def divisible_work(
    passes: Passes,
    batches: int,
    operations: Operations,
    steps: int,
    traffic: Traffic,
    copied: Mapping[str, Mapping[str, int]],
    stored: Mapping[str, int],
    blocks: Sequence[Sequence[GroupShare]] = (),
) -> RankWork:
    """The work of a run, with the shares of groups and what statistics take apart.

    Args:
        passes: over the model, with the share of each group.
        batches: number of calibration batches.
        operations: of one rank that does all, like the next two.
        steps: number of batches at all stops.
        traffic: disk traffic and overhead.
        copied: module → tensor → bytes in memory, when it is solved. Where no weight changes at its
            stop, each rank rounds those that it writes.
        stored: bytes of what is packed and written at once.
        blocks: of a run without data, the modules of each block.
    """
    running = [work for one, works in passes if one.forwards for work in works]
    stops = [stop for work in running for stop in work.stops]
    groups = [
        [
            OwnedGroup(
                f"{shares[0].names[0]} {number}",
                group.solving,
                group.summed,
                sum(
                    size
                    for name in group.names
                    for key, size in copied.get(name, {}).items()
                    if group.changes or key not in ("weight", "bias")
                ),
                group.spread,
                group.repeated,
                group.divides,
            )
            for number, group in enumerate(shares)
        ]
        for shares in [*(stop.shares for stop in stops), *blocks]
    ]
    fixed = sum(one.solving + one.repeated for stop in stops for one in stop.shares)
    statistics = sum(stop.cost.flops for stop in stops) - fixed
    return RankWork(
        stops=groups,
        batches=batches,
        operations=operations,
        statistics=statistics,
        steps=steps,
        traffic=traffic,
        stored=stored,
    )


def plan_ranks(
    layout: Layout, runs: Mapping[int, RankRun], rates: Rates | None, links: Links
) -> RankPlan:
    """Plan the work of several ranks, and of fewer of them.

    Args:
        layout: the ranks.
        runs: the run on each number of ranks, in rising order.
        rates: of each rank; ``None`` without times.
        links: between the ranks.
    """
    counts: list[RankCount] = []
    for ranks, run in runs.items():
        nodes = layout.nodes_of(ranks)
        loads = rank_loads(run.work, ranks)
        seconds = rank_seconds(run.work, loads, nodes, rates, links) if rates else {}
        time = sum(seconds.values()) if rates else None
        first = counts[0].time if counts else time
        counts.append(
            RankCount(
                ranks,
                nodes,
                run.host,
                run.device,
                sent=max(one.reduce_sent + one.broadcast_sent for one in loads),
                received=max(one.reduce_received + one.broadcast_received for one in loads),
                seconds=seconds,
                time=time,
                speedup=first / time if first and time else None,
            )
        )
    return RankPlan(layout.ranks, layout.nodes, links, loads, counts, pays_to(counts))


def pays_to(counts: Sequence[RankCount]) -> int | None:
    """The first number of ranks of which twice as many gain less than a tenth; ``None``: none."""
    times = {one.ranks: one.time for one in counts}
    for ranks, time in times.items():
        twice = times.get(2 * ranks)
        if time is not None and twice is not None and twice > _WORTH * time:
            return ranks
    return None
