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
statistics              from the first token of a unit until it is solved
copies of a unit        from then on, with twin streams
a solver's workspace    while a unit is solved
learned parameters      before a pass; see :mod:`llmcompressor.planning.workload`
packed tensors          of a block while it is packed, and of the one before while it is written
freed memory            the part that is not returned to the system
======================  ==========================================================================

If the whole model is in memory, all blocks are always held, and packed tensors are held until their
file is written.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType

from llmcompressor.core.contract import Granularity
from llmcompressor.pipelines.activations import LITTLE
from llmcompressor.planning.result import LearningPlan, PassPlan, Phase
from llmcompressor.planning.subject import REST, Part
from llmcompressor.planning.workload import BlockWork, PartLearning, Unit
from llmcompressor.runtime.memory import TOLERATED
from llmcompressor.runtime.progress import format_bytes

__all__ = ["Capacity", "PartMemory", "RunMemory", "estimate_phases", "shortages"]

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
_SQUARED = 8
"""The same of squares alone: what is squared, and the squares, in float32."""
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
        rounding: peak bytes besides the weights while a module is rounded.
        packing: the same while it is packed.
    """

    part: Part
    packed: int
    rounding: int
    packing: int


@dataclass(frozen=True)
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
        tokens: of all the data.
        hidden: width of the residual stream.
        limit: bytes that may be used of the device; ``None`` if unknown.
        scratches: number of passes that store blocks in files for the next pass.
        reads_ahead: the next block is prefetched.
        buffers: batches are so small that statistics buffer their tokens.
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
    scratches: int = 0
    reads_ahead: bool = True
    tokens: int = 0
    hidden: int = 0
    limit: int | None = None
    buffers: bool = False


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


def estimate_phases(
    footprint: RunMemory,
    loads: Sequence[PartMemory],
    passes: Sequence[tuple[PassPlan, Sequence[BlockWork]]],
    seconds: Mapping[str, float],
    learned: Mapping[int, Sequence[PartLearning]] = MappingProxyType({}),
) -> list[Phase]:
    """Estimate the demands of each phase of a run.

    Args:
        footprint: properties of the run.
        loads: of the blocks in order, and last of the modules outside of blocks.
        passes: over the model, with the work of each part.
        seconds: estimated time by phase.
        learned: index of a pass → memory of each part for the learning before it.
    """
    peaks = {"load": _loading(footprint, loads)}
    for number, parts in learned.items():
        learning = passes[number][0].learning
        assert learning is not None
        peaks["learn"] = _most(
            footprint, [peaks.get("learn"), _learning(footprint, loads, learning, parts)]
        )
    for one, works in passes:
        if one.forwards:
            calibrate, solve = _calibrating(footprint, loads, one, works)
            peaks["calibrate"] = _most(footprint, [peaks.get("calibrate"), calibrate])
            peaks["solve"] = _most(footprint, [peaks.get("solve"), solve])
    peaks["save"] = _saving(footprint, loads, passes)
    disk = _disk(footprint, loads, passes)
    blocks = [one.part.loaded for one in loads[:-1]]
    # Freed when the last one is processed: blocks are outside of the heap, and tensors computed
    # from them are not.
    gone = sum(blocks[: -1 - _AHEAD]) if footprint.is_streamed else 0
    return [
        Phase(name, *_split_host_device(footprint, peak, gone), disk[name], seconds.get(name, 0.0))
        for name, peak in peaks.items()
    ]


def _disk(
    footprint: RunMemory,
    loads: Sequence[PartMemory],
    passes: Sequence[tuple[PassPlan, Sequence[BlockWork]]],
) -> dict[str, int]:
    """Peak bytes on disk in each phase."""
    spilled = max(
        (one.activations if _is_in_pages(footprint, one) else one.spilled for one, _ in passes),
        default=0,
    )
    learning = [one.learning for one, _ in passes if one.learning is not None]
    learn = max((one.spilled for one in learning), default=0)
    disk = {"load": 0, "calibrate": spilled, "solve": spilled, "save": footprint.output}
    if footprint.is_streamed:  # the output's disk space is allocated at the beginning
        scratch = footprint.scratches * sum(one.part.loaded for one in loads[:-1])
        scratch += sum(one.kept for one in learning)
        spilled += footprint.output + scratch
        learn += footprint.output + scratch
        disk = {"load": footprint.output, "calibrate": spilled, "solve": spilled, "save": spilled}
    disk["learn"] = learn
    disk["save"] += footprint.others
    return disk


def _most(footprint: RunMemory, moments: Sequence[_MemoryUse | None]) -> _MemoryUse:
    """Return the moment of peak memory; with a device, the peaks of both memories."""
    there = [one for one in moments if one is not None]
    most = max(there, key=lambda one: one.model + one.host)
    if not footprint.on_device:
        return most
    return replace(most, model=max(one.model for one in there), host=max(one.host for one in there))


def _split_host_device(footprint: RunMemory, moment: _MemoryUse, gone: int) -> tuple[int, int]:
    """Return the bytes on the host and on the device."""
    if footprint.on_device:
        return footprint.base + moment.host, moment.model
    kept = min(TOLERATED, moment.passing + gone)
    return footprint.base + kept + moment.host + moment.model, 0


def _resident(footprint: RunMemory, loads: Sequence[PartMemory], index: int) -> _MemoryUse:
    """Bytes of weights while a block is processed."""
    if not footprint.is_streamed:
        return _MemoryUse(sum(one.part.loaded for one in loads) - footprint.present, 0)
    own, rest = loads[index].part, loads[-1].part
    block = 0 if own.name == REST else own.loaded
    following = loads[index + 1].part if index + 1 < len(loads) else None
    ahead = 0
    if footprint.reads_ahead and following is not None and following.name != REST:
        ahead = following.source
    return _MemoryUse(rest.loaded + block, ahead)


def _loading(footprint: RunMemory, loads: Sequence[PartMemory]) -> _MemoryUse:
    """Bytes while weights are loaded, including converted ones next to their originals."""
    if not footprint.is_streamed:
        whole = _resident(footprint, loads, 0)
        extra = 0 if footprint.present else max(one.part.converted for one in loads)
        return _MemoryUse(whole.model + extra, 0)
    moments = []
    for index, one in enumerate(loads):
        held = _resident(footprint, loads, index)
        moments.append(_MemoryUse(held.model + one.part.converted, held.host))
    return _most(footprint, moments)


def _learning(
    footprint: RunMemory,
    loads: Sequence[PartMemory],
    learning: LearningPlan,
    parts: Sequence[PartLearning],
) -> _MemoryUse:
    """Peak while learning: the backward through a part, or the step after it."""
    waiting = min(learning.activations, learning.budget)
    batches = footprint.tokens * _LEARNED_FROM if footprint.on_device else 0
    block = max((one.part.loaded for one in loads[:-1]), default=0)
    moments = []
    for index, (load, part) in enumerate(zip(loads, parts, strict=True)):
        held = _resident(footprint, loads, index)
        model = held.model + learning.held + waiting + batches
        if load.part.name == REST and footprint.is_streamed:  # the last block is still loaded
            model += block
        # the heap keeps memory that was just freed; a device holds only tensors
        more = max if footprint.on_device else operator.add
        passing = part.held + more(part.saved, part.workspace)
        moments.append(_MemoryUse(model + passing, held.host, passing))
        stepping = held.model + learning.held + batches + learning.stepping
        moments.append(_MemoryUse(stepping, held.host, learning.stepping))
    return _most(footprint, moments)


def _calibrating(
    footprint: RunMemory, loads: Sequence[PartMemory], one: PassPlan, works: Sequence[BlockWork]
) -> tuple[_MemoryUse, _MemoryUse]:
    """Peaks while tokens run through a unit, and while a unit is solved."""
    calibrating, solving = [_MemoryUse(0, 0)], [_MemoryUse(0, 0)]
    batches = footprint.tokens * _BATCHES if footprint.on_device else 0
    for index, work in enumerate(works):
        held = _resident(footprint, loads, index)
        for unit in work.units:
            waiting, elsewhere = _waiting_bytes(footprint, one, unit), 0
            if _exceeds_device_share(
                footprint, one, loads[-1]
            ):  # except the compared original inputs
                waiting = unit.compared(footprint.run_tokens)
                elsewhere = min(one.activations, one.budget)
            host = held.host + elsewhere
            buffered = unit.buffered * footprint.buffers
            present = held.model + batches + waiting + unit.statistics + buffered
            running, own = _running_bytes(footprint, one, work, unit)
            placed = partial(_split_kept_data, footprint, unit, held.model + batches + waiting)
            kept, kept_elsewhere = placed(unit.kept(footprint.tokens))
            model = present - int(own * waiting) + running + kept
            calibrating.append(_MemoryUse(model, host + kept_elsewhere, running))
            present += unit.copied if one.streams > 1 else 0
            solved = unit.solving(footprint.run_tokens, device=footprint.on_device)
            solving.append(_MemoryUse(present + solved, host, running))
            for data, further in unit.judging(
                footprint.tokens, footprint.run_tokens, device=footprint.on_device
            ):
                kept, kept_elsewhere = placed(data)
                solving.append(_MemoryUse(present + kept + further, host + kept_elsewhere, running))
    return _most(footprint, calibrating), _most(footprint, solving)


def _split_kept_data(footprint: RunMemory, unit: Unit, present: int, data: int) -> tuple[int, int]:
    """Split the kept data into bytes on the model's device and on the host.

    Args:
        footprint: of the run.
        unit: the unit that needs the data.
        present: bytes on the device before any data is kept.
        data: bytes of kept data.
    """
    if not footprint.on_device:
        return data, 0
    if unit.offloads:
        return 0, data
    if footprint.limit is None:
        return data, 0
    room = int(max(footprint.limit - present, 0) * _SHARE_FOR_ACTIVATIONS)
    return min(data, room), max(data - room, 0)


def _waiting_bytes(footprint: RunMemory, one: PassPlan, unit: Unit) -> int:
    """Bytes of activations that wait while a unit is processed.

    On the host it is the estimate of the pipeline. On a device it is what a decoder layer holds at
    that place: the input of a projection back to the residual stream and, in attention, the
    states it was computed from.
    """
    if not one.activations:
        return 0
    estimate = _waiting_on_host(footprint, one)
    if not footprint.on_device or one.level not in _STATES_AT:
        return estimate
    states, hidden = _STATES_AT[Granularity(one.level)] * footprint.hidden, footprint.hidden
    if one.level == Granularity.LINEAR and unit.is_single:
        states += unit.columns if unit.columns > hidden else _IN_ATTENTION * hidden
    return min(footprint.tokens * one.streams * footprint.itemsize * states, one.budget)


def _is_in_pages(footprint: RunMemory, one: PassPlan) -> bool:
    """Return True if activations are so small that they wait in the pages of a file."""
    return not footprint.on_device and one.activations <= min(LITTLE, one.budget)


def _waiting_on_host(footprint: RunMemory, one: PassPlan) -> int:
    """Bytes of waiting activations in main memory, by the estimate of the pipeline."""
    if not one.activations or not _is_in_pages(footprint, one):
        return min(one.activations, one.budget)
    return one.activations * footprint.run_tokens // max(footprint.tokens, footprint.run_tokens)


def _exceeds_device_share(footprint: RunMemory, one: PassPlan, rest: PartMemory) -> bool:
    """Return True if activations are offloaded to the host, as they exceed the device's share."""
    if not footprint.on_device or footprint.limit is None:
        return False
    return one.activations > (footprint.limit - rest.part.loaded) * _SHARE_FOR_ACTIVATIONS


def _running_bytes(
    footprint: RunMemory, one: PassPlan, work: BlockWork, unit: Unit
) -> tuple[int, float]:
    """Bytes of a batch that runs through a block, and the share of waiting activations in it.

    On the host this is an upper bound, to which the C library's reserve was measured. A device
    holds only tensors: the residual stream, and the widest three of an MLP, or one of them
    while its statistics are updated.
    """
    batch = footprint.run_tokens * work.intermediate
    if not footprint.on_device:
        counting = batch * _COUNTED if unit.statistics else 0
        return batch * footprint.itemsize * _WIDE_INPUTS + counting, 0.0
    states = footprint.run_tokens * footprint.hidden * footprint.itemsize
    counting = unit.moments or (batch * _SQUARED if unit.statistics else 0)
    wide = batch * footprint.itemsize
    share = footprint.run_tokens / max(footprint.tokens * one.streams, footprint.run_tokens)
    return _STATES_AT[Granularity.LINEAR] * states + max(_AT_ONCE * wide, wide + counting), share


def _saving(
    footprint: RunMemory,
    loads: Sequence[PartMemory],
    passes: Sequence[tuple[PassPlan, Sequence[BlockWork]]],
) -> _MemoryUse:
    waiting = 0
    if footprint.is_streamed:
        staying = (one for one, _ in passes if not _exceeds_device_share(footprint, one, loads[-1]))
        waiting = max((_waiting_on_host(footprint, one) for one in staying), default=0)
    moments = []
    for index, one in enumerate(loads):
        held = _resident(footprint, loads, index)
        moments.append(_MemoryUse(held.model + waiting + one.rounding, held.host, one.rounding))
        if footprint.is_streamed:
            before = loads[index - 1].packed if index else 0
            packed = one.packed + before + one.part.converted
        else:
            packed = min(footprint.shard, sum(each.packed for each in loads))
        model = held.model + waiting + one.packing
        moments.append(_MemoryUse(model, held.host + packed, one.packing))
    return _most(footprint, moments)


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
                "run "
                "would end for want of memory, or swap."
            )
        elif capacity.allowed is not None and peak > capacity.allowed:
            yield (
                f"{takes}, where max_memory allows {format_bytes(capacity.allowed)}: it holds "
                "weights "
                "and waiting activations within its limit, but not what solvers take, nor what "
                "modifiers keep of the data."
            )
