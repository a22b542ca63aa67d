# SPDX-License-Identifier: Apache-2.0
"""Peak memory and disk of each phase of a run, estimated from what is held at each moment.

======================  ==========================================================================
held                    when
======================  ==========================================================================
Python, its libraries   always; measured
embeddings, norms, head always
a block                 from when passes reach it until it is written
the next block          meanwhile, as stored: it is prefetched
waiting activations     during calibration, up to their budget; the rest is in files, and so are
                        small activations, except those of the running batch
a batch's activations   while it runs through a block
what modifiers hold     from the first token of a stop until it is solved
copies of a stop        while it is solved, with twin streams
a modifier's peak       while a stop is solved, while a block is finished, or while it learns
packed tensors          of a block while it is packed, and of the one before while it is written
freed memory            the part that is not returned to the system
======================  ==========================================================================

If the whole model is in memory, all blocks are always held, and packed tensors are held until their
file is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from llmcompressor.core.contract import Cost, Granularity
from llmcompressor.pipelines.activations import LITTLE
from llmcompressor.planning.result import PassPlan, Phase
from llmcompressor.planning.subject import REST, Part
from llmcompressor.planning.workload import BlockWork, Stop
from llmcompressor.runtime.memory import TOLERATED
from llmcompressor.runtime.progress import format_bytes

_WIDE_INPUTS = 4
"""Tensors as wide as the widest input that are alive at once in a forward: gate, up, their
product, and what comes next."""
_AT_ONCE = 3
"""Of those, how many there are at any one time."""
_STATES_AT = {Granularity.LINEAR: 4, Granularity.SUB_BLOCK: 2, Granularity.BLOCK: 2}
"""Tensors of the width between blocks that the frames of a paused forward refer to: the embedded
tokens, the block's input, the residual stream, what is normed."""
_IN_ATTENTION = 3
"""Further ones in front of the projection of an attention: queries, keys and values, its result."""
_COUNTED = 6
"""Bytes per token and column while second moments are added up."""
_BATCHES = 16
"""Bytes of the batches per token: ids, and which of them are real."""
_LEARNED_FROM = 24
"""The same where rotations are learned: ids, labels, and which are real."""
_SHARE_FOR_ACTIVATIONS = 0.5
"""Of what the limit of a device leaves; again of the rest, for what modifiers keep of the data."""
_AHEAD = 1
"""Blocks that are read while one is worked on."""


@dataclass(frozen=True)
class PartMemory:
    """Memory that a part of a model needs.

    Attributes:
        part: the part.
        packed: bytes of its packed tensors as stored.
        rounding: peak bytes besides the weights while it is rounded, or finished by modifiers.
        packing: the same while a module is packed.
        learning: costs of the modifiers that learn first, each before its pass.
    """

    part: Part
    packed: int
    rounding: int
    packing: int
    learning: Sequence[Cost] = ()


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """Properties of a run for the estimate of memory.

    Attributes:
        base: bytes resident before anything is loaded, including Python and its libraries.
        is_streamed: blocks are loaded one by one; otherwise the whole model is in memory.
        present: bytes of the model that are in memory already, and counted in ``base``.
        on_device: weights and statistics are on an accelerator.
        output: bytes of the weight files.
        shard: bytes of the largest weight file.
        others: bytes of the other files.
        itemsize: of the model's dtype.
        run_tokens: tokens that run through a block at once.
        scratch: bytes on disk of blocks that a pass leaves for the next, and of progress.
        reads_ahead: the next block is prefetched.
        tokens: of all the data.
        hidden: width of the residual stream.
        limit: bytes that may be used of the device; ``None`` if unknown.
    """

    base: int
    is_streamed: bool
    present: int
    on_device: bool
    output: int
    shard: int
    others: int
    itemsize: int
    run_tokens: int
    scratch: int = 0
    reads_ahead: bool = True
    tokens: int = 0
    hidden: int = 0
    limit: int | None = None


@dataclass(frozen=True)
class _MemoryUse:
    """Bytes held at a moment of the run.

    Attributes:
        model: bytes on the model's device.
        host: bytes that are always on the host.
        passing: temporary bytes among ``model``.
    """

    model: int
    host: int
    passing: int = 0

    def more(self, model: int, host: int = 0, passing: int = 0) -> _MemoryUse:
        """Return this with further bytes, of which ``passing`` are temporary."""
        return _MemoryUse(self.model + model, self.host + host, self.passing + passing)


_PassWorks = Sequence[tuple[PassPlan, Sequence[BlockWork]]]


def estimate_phases(
    run: RunMemory, loads: Sequence[PartMemory], passes: _PassWorks, seconds: Mapping[str, float]
) -> list[Phase]:
    """Estimate the demands of each phase of a run.

    Args:
        run: properties of the run.
        loads: of the blocks in order, and last of the modules outside of blocks.
        passes: over the model, with the work of each part.
        seconds: estimated time by phase.
    """
    return _Estimate(run, loads, passes).phases(seconds)


class _Estimate:
    def __init__(self, run: RunMemory, loads: Sequence[PartMemory], passes: _PassWorks) -> None:
        self._run = run
        self._loads = loads
        self._running = [(one, works) for one, works in passes if one.forwards]
        self._learning = [one for one, _ in passes if one.activations and not one.forwards]

    def phases(self, seconds: Mapping[str, float]) -> list[Phase]:
        run, loads = self._run, self._loads
        moments: dict[str, list[_MemoryUse]] = {"load": self._load()}
        if any(one.learning for one in loads):
            moments["learn"] = self._learn()
        for one, works in self._running:
            calibrate, solve = self._calibrate(one, works)
            moments.setdefault("calibrate", []).extend(calibrate)
            moments.setdefault("solve", []).extend(solve)
        moments["save"] = self._save()
        disk = self._disk()
        # Freed when the last block is processed: blocks are outside of the heap, and tensors
        # computed from them are not.
        gone = sum(one.part.loaded for one in loads[: -2 - _AHEAD]) if run.is_streamed else 0
        found = []
        for name, each in moments.items():
            peak = max(each, key=lambda one: one.model + one.host)
            if run.on_device:  # its peak and the host's are at different moments
                device = max(one.model for one in each)
                host = run.base + max(one.host for one in each)
            else:
                kept = min(TOLERATED, peak.passing + gone)
                device, host = 0, run.base + kept + peak.host + peak.model
            found.append(Phase(name, host, device, disk[name], seconds.get(name, 0.0)))
        return found

    def _disk(self) -> dict[str, int]:
        """Peak bytes on disk in each phase."""
        run = self._run
        spilled = max(
            (one.activations if self._in_pages(one) else one.spilled for one, _ in self._running),
            default=0,
        )
        learn = max((one.spilled for one in self._learning), default=0)
        disk = {"load": 0, "calibrate": spilled, "solve": spilled, "save": 0, "learn": learn}
        if run.is_streamed:  # the output's disk space is allocated at the beginning
            disk["save"] = spilled
            disk = {name: own + run.output + run.scratch for name, own in disk.items()}
            disk["load"] = run.output
        else:
            disk["save"] = run.output
        disk["save"] += run.others
        return disk

    def _resident(self, index: int) -> _MemoryUse:
        """Bytes of weights while a block is processed."""
        run, loads = self._run, self._loads
        if not run.is_streamed:
            return _MemoryUse(sum(one.part.loaded for one in loads) - run.present, 0)
        own, rest = loads[index].part, loads[-1].part
        block = 0 if own.name == REST else own.loaded
        following = loads[index + 1].part if index + 1 < len(loads) else rest
        reads = run.reads_ahead and following.name != REST
        return _MemoryUse(rest.loaded + block, following.source if reads else 0)

    def _load(self) -> list[_MemoryUse]:
        """Moments while weights are loaded, with converted ones next to their originals."""
        if not self._run.is_streamed:
            extra = 0 if self._run.present else max(one.part.converted for one in self._loads)
            return [self._resident(0).more(extra)]
        return [
            self._resident(index).more(one.part.converted) for index, one in enumerate(self._loads)
        ]

    def _learn(self) -> list[_MemoryUse]:
        """Moments of the backward through each part."""
        run, moments = self._run, []
        waiting = max((min(one.activations, one.budget) for one in self._learning), default=0)
        batches = run.tokens * _LEARNED_FROM if run.on_device else 0
        largest = max((one.part.loaded for one in self._loads[:-1]), default=0)
        for index, load in enumerate(self._loads):
            is_head = load.part.name == REST and run.is_streamed  # the last block is still loaded
            held = waiting + batches + is_head * largest
            for cost in load.learning:
                more = held + cost.held_bytes + cost.peak_bytes
                moments.append(self._resident(index).more(more, passing=cost.peak_bytes))
        return moments

    def _calibrate(
        self, one: PassPlan, works: Sequence[BlockWork]
    ) -> tuple[list[_MemoryUse], list[_MemoryUse]]:
        """Moments while tokens run up to a stop, and while it is solved."""
        run, calibrating, solving = self._run, [_MemoryUse(0, 0)], [_MemoryUse(0, 0)]
        batches = run.tokens * _BATCHES if run.on_device else 0
        for index, work in enumerate(works):
            for stop in work.stops:
                waiting, elsewhere = self._waiting(one, stop), 0
                if self._exceeds_device_share(one):
                    waiting, elsewhere = 0, min(one.activations, one.budget)
                held = self._resident(index).more(batches + waiting, elsewhere)
                room = self._room(stop, held.model)
                kept, kept_elsewhere = _within(room, stop.cost.data_bytes)
                held = held.more(stop.cost.held_bytes + kept, kept_elsewhere)
                running, own = self._batch(one, work, stop)
                calibrating.append(held.more(running - int(own * waiting), passing=running))
                copied = stop.copied if one.streams > 1 else 0
                computed, computed_elsewhere = _within(room - kept, stop.cost.peak_data_bytes)
                solved = copied + stop.solutions + stop.cost.own_peak_bytes + computed
                solving.append(held.more(solved, computed_elsewhere, passing=running))
        return calibrating, solving

    def _room(self, stop: Stop, present: int) -> float:
        """Bytes of kept data that find room on the model's device besides those present."""
        if not self._run.on_device:
            return inf
        if stop.data_on_host:
            return 0
        if self._run.limit is None:
            return inf
        return int(max(self._run.limit - present, 0) * _SHARE_FOR_ACTIVATIONS)

    def _waiting(self, one: PassPlan, stop: Stop) -> int:
        """Bytes of activations that wait while a stop is processed.

        On the host it is the estimate of the pipeline. On a device it is what a decoder layer holds
        at that place: the input of a projection back to the residual stream and, in attention, the
        states it was computed from.
        """
        run = self._run
        if not run.on_device or one.level not in _STATES_AT or not one.activations:
            return self._waiting_on_host(one)
        states = _STATES_AT[Granularity(one.level)] * run.hidden
        is_single = sum(map(len, stop.groups)) == 1
        if one.level == Granularity.LINEAR and is_single:
            is_wide = stop.columns > run.hidden
            states += stop.columns if is_wide else _IN_ATTENTION * run.hidden
        return min(run.tokens * one.streams * run.itemsize * states, one.budget)

    def _waiting_on_host(self, one: PassPlan) -> int:
        if not self._in_pages(one):
            return min(one.activations, one.budget)
        tokens = max(self._run.tokens, self._run.run_tokens, 1)
        return one.activations * self._run.run_tokens // tokens

    def _in_pages(self, one: PassPlan) -> bool:
        """Return True if activations are so small that they wait in the pages of a file."""
        return not self._run.on_device and one.activations <= min(LITTLE, one.budget)

    def _exceeds_device_share(self, one: PassPlan) -> bool:
        """Return True if activations wait on the host, as they exceed the device's share."""
        run, rest = self._run, self._loads[-1].part.loaded
        if not run.on_device or run.limit is None:
            return False
        return one.activations > (run.limit - rest) * _SHARE_FOR_ACTIVATIONS

    def _batch(self, one: PassPlan, work: BlockWork, stop: Stop) -> tuple[int, float]:
        """Bytes of a batch that runs through a block, and its share of the waiting activations.

        On the host this is an upper bound, to which the C library's reserve was measured. A device
        holds only tensors: the residual stream, and the widest three of an MLP, or one of them
        while its statistics are updated.
        """
        run = self._run
        batch = run.run_tokens * work.intermediate
        if not run.on_device:
            counting = batch * _COUNTED if stop.cost.held_bytes else 0
            return batch * run.itemsize * _WIDE_INPUTS + counting, 0.0
        states = run.run_tokens * run.hidden * run.itemsize
        wide = batch * run.itemsize
        share = run.run_tokens / max(run.tokens * one.streams, run.run_tokens, 1)
        own = _STATES_AT[Granularity.LINEAR] * states + max(_AT_ONCE * wide, wide + stop.moments)
        return own, share

    def _save(self) -> list[_MemoryUse]:
        run, loads, waiting = self._run, self._loads, 0
        if run.is_streamed:
            staying = [one for one, _ in self._running if not self._exceeds_device_share(one)]
            waiting = max(map(self._waiting_on_host, staying), default=0)
        moments = []
        for index, one in enumerate(loads):
            held = self._resident(index).more(waiting)
            moments.append(held.more(one.rounding, passing=one.rounding))
            if run.is_streamed:
                before = loads[index - 1].packed if index else 0
                packed = one.packed + before + one.part.converted
            else:
                packed = min(run.shard, sum(each.packed for each in loads))
            moments.append(held.more(one.packing, packed, one.packing))
        return moments


# --------------------
# Warnings about phases that exceed the available or allowed memory.


@dataclass(frozen=True)
class Capacity:
    """Available amount of a kind of memory.

    Attributes:
        name: name of the memory in messages.
        free: bytes that this process uses or can still allocate; ``None`` if unknown.
        allowed: limit by the user in bytes; ``None`` without one.
    """

    name: str
    free: int | None = None
    allowed: int | None = None


def _within(room: float, data: int) -> tuple[int, int]:
    """Bytes of data on the model's device, where ``room`` bytes are free, and elsewhere."""
    here = data if data <= room else int(room)
    return here, data - here


def shortages(phases: Sequence[Phase], host: Capacity, device: Capacity) -> Iterator[str]:
    """Yield a message for each kind of memory that is too small.

    Args:
        phases: of the run.
        host: main memory.
        device: memory of the accelerator, if the run uses one.
    """
    for capacity, bytes_of in ((host, attrgetter("host")), (device, attrgetter("device"))):
        most = max(phases, key=bytes_of, default=None)
        if most is None:
            continue
        peak = bytes_of(most)
        takes = f"{most.name.capitalize()} takes {format_bytes(peak)} of {capacity.name}"
        if capacity.free is not None and peak > capacity.free:
            yield (
                f"{takes}, and {format_bytes(capacity.free)} are free here: on this machine the "
                "run would end for want of memory, or swap."
            )
        elif capacity.allowed is not None and peak > capacity.allowed:
            yield (
                f"{takes}, where max_memory allows {format_bytes(capacity.allowed)}: it holds "
                "weights and waiting activations within its limit, but not what solvers take, nor "
                "what modifiers keep of the data."
            )
