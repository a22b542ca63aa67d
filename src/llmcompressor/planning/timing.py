# SPDX-License-Identifier: Apache-2.0
"""Time estimate of a run from its operations, its traffic and the machine's measured rates.

Prefetching and writing overlap with the computation of a streamed run; only their excess adds
time. The rates were measured for a second on an otherwise idle machine, so that the result is an
estimate within a stated factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmcompressor.modifiers.demands import Work
from llmcompressor.planning.result import Estimate, LearningPlan, Operations, PassPlan, Rates
from llmcompressor.planning.workload import BlockWork

__all__ = ["Traffic", "estimate_time", "operations_of"]

_VISIT_BYTES = 8
"""Of one visit of a weight: float32 is read and written."""
_STEP_SECONDS = 0.003
"""Of Python, for one batch at one stop."""
_DOUBT = 1.6
"""The factor that measured runs stay within, besides the spread of the measurement."""


@dataclass(frozen=True)
class Traffic:
    """Disk traffic and overhead of a run.

    Attributes:
        read: bytes of weights to read.
        written: bytes of the output.
        rounding: seconds to round and pack all weights.
        first: bytes to read before computation can begin.
        handling: seconds of Python overhead.
        is_streamed: reading and writing overlap with computation.
    """

    read: int
    written: int
    rounding: float
    first: int
    is_streamed: bool
    handling: float = 0.0


def operations_of(
    passes: Sequence[tuple[PassPlan, Sequence[BlockWork]]],
    tokens: int,
    context: int,
    rounded: int,
    beside: Work,
) -> Operations:
    """Count the multiply-adds of all passes.

    Args:
        passes: over the model, with the work of each part.
        tokens: number of tokens of the calibration data.
        context: number of tokens of a sample.
        rounded: number of weights that are rounded.
        beside: work of modifiers outside of calibration.
    """
    forward, solve = beside.forward, beside.solve
    gram = cross = 0
    for one, works in passes:
        if not one.forwards:
            continue
        for work in works:
            matrices, attention = work.run(one.forwards, one.streams)
            per_token = matrices + attention * context + one.streams * work.shown
            forward += tokens * per_token
            for group in work.groups:
                seen = int(tokens * group.share)
                gram += seen * group.effort.gram
                cross += seen * group.effort.cross if one.streams > 1 else 0
                solve += group.effort.solve
    learning = [one.learning for one, _ in passes if one.learning is not None]
    learn = sum(one.forwards + one.products for one in learning)
    return Operations(forward, gram, cross, solve, rounded, learn)


def estimate_time(
    rates: Rates,
    operations: Operations,
    passes: Sequence[tuple[PassPlan, Sequence[BlockWork]]],
    batches: int,
    traffic: Traffic,
    beside: Work,
    tokens: int,
    context: int,
) -> tuple[dict[str, float], Estimate]:
    """Estimate the seconds of each phase, and their total with its range.

    Args:
        rates: measured rates of this machine.
        operations: result of :func:`operations_of`.
        passes: over the model.
        batches: number of batches.
        traffic: disk traffic and overhead.
        beside: work of modifiers outside of calibration.
        tokens: number of tokens of the calibration data.
        context: number of tokens of a sample.
    """
    moments = operations.gram + operations.cross
    stops = sum(len(work.units) for one, works in passes if one.forwards for work in works)
    between = beside.attention + sum(
        tokens * context * work.run(one.forwards, one.streams)[1]
        for one, works in passes
        for work in works
        if one.forwards
    )
    calibrate = (operations.forward - between) / rates.model_products
    calibrate += moments / (rates.statistics or rates.model_products)
    calibrate += stops * batches * _STEP_SECONDS
    calibrate += between / (rates.attention or rates.model_products)
    groups = [group for _, works in passes for work in works for group in work.groups]
    watched = sum(int(tokens * group.share) * group.effort.watch for group in groups)
    calibrate += watched * _VISIT_BYTES / rates.memory
    visits = beside.visits + sum(group.effort.visits for group in groups)
    solve = operations.solve / rates.float32_products + visits * _VISIT_BYTES / rates.memory
    reading = traffic.read / rates.disk_read
    writing = traffic.written / rates.disk_write
    saving = traffic.rounding + traffic.handling
    computing = calibrate + solve + saving
    if traffic.is_streamed:
        first = traffic.first / rates.disk_read
        reading = first + max(reading - first - computing, 0.0)
        writing = max(writing - computing, 0.0)
    seconds = {
        "load": reading,
        "calibrate": calibrate,
        "solve": solve,
        "save": saving + writing,
    }
    learning = [one.learning for one, _ in passes if one.learning is not None]
    if learning:
        seconds["learn"] = sum(_learning_seconds(rates, one, traffic) for one in learning)
    whole = sum(seconds.values())
    doubt = _DOUBT * rates.spread
    return seconds, Estimate(whole, whole / doubt, whole * doubt)


def _learning_seconds(rates: Rates, learning: LearningPlan, traffic: Traffic) -> float:
    computing = learning.forwards / rates.model_products
    computing += learning.products / rates.float32_products
    computing += learning.visits * _VISIT_BYTES / rates.memory
    reading = learning.read / rates.disk_read if traffic.is_streamed else 0.0
    return max(computing, reading)
