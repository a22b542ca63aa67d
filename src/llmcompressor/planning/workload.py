# SPDX-License-Identifier: Apache-2.0
"""Workload of a run: the forwards of each block, and the statistics and solvers of its modules."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Embedding, Linear, Module

from llmcompressor.core.contract import (
    CalibrationCost,
    ComputeCost,
    DataSize,
    Granularity,
    LearningCost,
)
from llmcompressor.core.modifier import Modifier
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import sub_blocks
from llmcompressor.modeling.fused import fused_partners, is_expert
from llmcompressor.modeling.names import own_parameters
from llmcompressor.modeling.weights import config_value, text_config
from llmcompressor.moe.layouts import DOWN
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.numerics.gram import CHUNK_TOKENS
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.pipelines.batches import float32_linears
from llmcompressor.pipelines.moe_routing import experts_per_wave
from llmcompressor.planning.result import Estimate, LearningPlan, Operations, PassPlan, Rates
from llmcompressor.planning.subject import REST, Part
from llmcompressor.schemes.attention import updates_kv_cache

__all__ = [
    "BlockWork",
    "Group",
    "LearningContext",
    "PartLearning",
    "Traffic",
    "Unit",
    "Widths",
    "block_works",
    "count_operations",
    "estimate_time",
    "measure_rates",
    "plan_learning",
    "read_widths",
]

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True)
class Widths:
    """Widths of a model's forward from its configuration.

    Attributes:
        heads: total width of the heads of a layer.
        expert_share: share of the experts that a token is routed to.
        hidden: width of the residual stream.
    """

    heads: int
    expert_share: float
    hidden: int = 0


@dataclass(frozen=True)
class Group:
    """Calibrated modules that share an input.

    Attributes:
        modules: the modules.
        effort: of all modifiers that calibrate them.
        elements: number of their weights.
        copied: bytes of their parameters, which are copied with twin streams.
        share: share of the tokens that reach them.
    """

    modules: tuple[Module, ...]
    effort: CalibrationCost
    elements: int
    copied: int
    share: float


@dataclass(frozen=True)
class Unit:
    """The groups of modules that are calibrated and solved at one stop."""

    groups: tuple[Group, ...]

    @property
    def statistics(self) -> int:
        """Bytes of statistics."""
        return sum(group.effort.statistics for group in self.groups)

    @property
    def buffered(self) -> int:
        """Bytes of buffered inputs, if batches are too small for an update of statistics."""
        return sum(group.effort.buffered for group in self.groups)

    @property
    def moments(self) -> int:
        """Bytes of the largest second moment (Gram matrix) update."""
        counting = (group for group in self.groups if group.effort.gram)
        columns = (one.in_features for group in counting for one in _linears(group))
        return max((_FLOAT * width**2 for width in columns), default=0)

    def compared(self, tokens: int) -> int:
        """Bytes of ``tokens`` tokens of the widest input that is paired with the original one."""
        twins = (group for group in self.groups if group.effort.cross)
        weights = (one.weight for group in twins for one in _linears(group))
        return tokens * max((one.shape[-1] * one.element_size() for one in weights), default=0)

    @property
    def columns(self) -> int:
        """Width of the widest input."""
        columns = (one.in_features for group in self.groups for one in _linears(group))
        return max(columns, default=0)

    @property
    def is_single(self) -> bool:
        """True if the unit has a single module."""
        return sum(len(group.modules) for group in self.groups) == 1

    @property
    def offloads(self) -> bool:
        """True if kept data is offloaded to main memory even if the device has room."""
        return any(group.effort.offloads for group in self.groups)

    def kept(self, tokens: int) -> int:
        """Bytes that are kept of all the data."""
        return tokens * sum(group.effort.kept for group in self.groups)

    def judging(
        self, tokens: int, run_tokens: int, *, device: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Yield, while groups run again on kept data, its bytes and further bytes.

        Each group frees its data afterwards. Arguments are those of :meth:`solving`, and
        ``tokens`` of all the data.
        """
        efforts = [group.effort for group in self.groups if group.effort.kept]
        for place, effort in enumerate(efforts):
            kept = sum(one.kept for one in efforts[place:]) + effort.outputs
            yield tokens * kept, effort.scaled_on(device=device) + run_tokens * effort.running

    def solving(self, run_tokens: int = 0, *, device: bool = False) -> int:
        """Peak of further bytes while the unit is solved, including solutions of earlier groups.

        Args:
            run_tokens: tokens that run through a block at once.
            device: the model is on an accelerator.
        """
        most = solutions = together = alone = 0
        for (effort, elements), alike in Counter(
            (group.effort, group.elements) for group in self.groups
        ).items():
            runs = effort.scaled_on(device=device) + run_tokens * effort.running
            workspace = effort.workspace_on(device=device)
            own = workspace if effort.kept else max(workspace, runs)
            if effort.together:
                together += alike * runs
                alone = max(alone, workspace)
            elif effort.solve:
                for first in range(0, alike, effort.at_once):
                    batched = min(effort.at_once, alike - first)
                    most = max(most, solutions + batched * own)
                    solutions += batched * _FLOAT * elements
        return max(most + together, alone)

    @property
    def copied(self) -> int:
        """Bytes of the copied original parameters."""
        return sum(group.copied for group in self.groups)


_FLOAT = 4


def _linears(group: Group) -> list[Linear]:
    return [one for one in group.modules if isinstance(one, Linear)]


@dataclass(frozen=True)
class BlockWork:
    """Workload of a block, or of the modules outside of blocks.

    Attributes:
        name: of the block.
        forward: multiply-adds per token of its matrices.
        attention: multiply-adds per token of its attention, per token of context.
        intermediate: elements per token of the widest input of its modules.
        units: units of calibrated modules, one for each stop.
        shown: multiply-adds per token of additional expert inputs during calibration.
        aside: part of ``forward`` outside of stops, which does not run again.
        attention_aside: the same part of ``attention``.
    """

    name: str
    forward: int
    attention: int
    intermediate: int
    units: tuple[Unit, ...]
    shown: int = 0
    aside: int = 0
    attention_aside: int = 0

    def run(self, forwards: int, streams: int) -> tuple[int, int]:
        """Return the multiply-adds per token of matrices, and of attention per token of context.

        Args:
            forwards: number of runs of calibrated modules.
            streams: number of runs of other modules.
        """
        again = forwards - streams
        return (
            forwards * self.forward - again * self.aside,
            forwards * self.attention - again * self.attention_aside,
        )

    @property
    def groups(self) -> Iterator[Group]:
        """Groups of all units."""
        return (group for unit in self.units for group in unit.groups)


def read_widths(config: Any) -> Widths:
    """Read the widths from a configuration of transformers."""
    text = text_config(config)
    heads = int(config_value(text, "num_attention_heads") or 0)
    hidden = int(config_value(text, "hidden_size") or 0)
    width = int(config_value(text, "head_dim") or (hidden // heads if heads else 0))
    experts = _first(text, _EXPERT_COUNTS)
    chosen = _first(text, _EXPERTS_PER_TOKEN)
    share = chosen / experts if experts and chosen else 1.0
    return Widths(heads * width, min(share, 1.0), hidden)


def _first(config: Any, names: Iterable[str]) -> int:
    values = (config_value(config, name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def block_works(
    parts: Sequence[Part],
    widths: Widths,
    modifiers: Sequence[Modifier],
    owners: Mapping[Module, Sequence[int]],
    level: Granularity | None,
    data: DataSize,
    *,
    every_expert: bool = False,
) -> list[BlockWork]:
    """Compute the workload of each part of a model in a pass.

    Args:
        parts: the blocks in order, and the modules outside of blocks.
        widths: of the model's forward.
        modifiers: of the pass.
        owners: module → indices of the modifiers that calibrate it.
        level: where forwards are paused; ``None`` if all modules are calibrated at once.
        data: the calibration data.
        every_expert: experts are calibrated with all tokens.
    """
    seen = 1.0 if every_expert else widths.expert_share
    return [_block_work(part, widths, modifiers, owners, level, data, seen) for part in parts]


def _block_work(
    part: Part,
    widths: Widths,
    modifiers: Sequence[Modifier],
    owners: Mapping[Module, Sequence[int]],
    level: Granularity | None,
    data: DataSize,
    seen: float,
) -> BlockWork:
    own = {name: module for name, module in part.modules.items() if module in owners}
    waves = _expert_waves(part, every=seen == 1)
    entering = [enter for enter, _ in waves] if seen == 1 else []
    groups = [
        _group(names, [own[name] for name in names], modifiers, owners, data, seen)
        for names in _shared_inputs(own, entering)
    ]
    forward, attention = _forward_work(part.modules, widths)
    forward_aside, attention_aside = _forward_work(_outside_stops(part, own, level), widths)
    inputs = [one.in_features for one in part.modules.values() if isinstance(one, Linear)]
    return BlockWork(
        part.name,
        0 if part.name == REST else forward,  # modules outside of blocks run once, or not at all
        attention,
        max(inputs, default=0),
        tuple(_units(part, own, groups, level, [stage for wave in waves for stage in wave])),
        int(seen * sum(_all_token_work(one, owners) for one in part.modules.values())),
        0 if part.name == REST else forward_aside,
        attention_aside,
    )


def _forward_work(modules: Mapping[str, Module], widths: Widths) -> tuple[int, int]:
    """Return the multiply-adds per token of matrices, and of attention per token of context."""
    attentions = sum(1 for one in modules.values() if updates_kv_cache(one))
    forward = sum(_multiplications(name, one, widths) for name, one in modules.items())
    return forward, attentions * widths.heads


def _outside_stops(
    part: Part, own: Mapping[str, Module], level: Granularity | None
) -> dict[str, Module]:
    """Modules of a block outside of its stops, at the sub-block level; empty at other levels.

    They are found by name, as modules that were removed from the block still count.
    """
    if level is not Granularity.SUB_BLOCK or part.name == REST or not own:
        return {}
    stops = sub_blocks(part.modules[part.name], part.name, set(own.values())).values()
    return {
        name: one
        for name, one in part.modules.items()
        if not any(f"{name}.".startswith(f"{stop}.") for stop in stops)
    }


def _expert_waves(part: Part, *, every: bool) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Names of the input Linears and of the down projections, for each wave of experts."""
    names = {module: name for name, module in part.modules.items()}
    mixtures = [one for one in part.modules.values() if isinstance(one, LinearExperts)]
    waves = [
        (mixture, range(first, min(first + size, mixture.num_experts)))
        for mixture in mixtures
        for size in [experts_per_wave(mixture, every=every)]
        for first in range(0, mixture.num_experts, size)
    ]
    return [
        (
            tuple(names[mixture.linear(one, role)] for one in wave for role in mixture.input_roles),
            tuple(names[mixture.linear(one, DOWN)] for one in wave),
        )
        for mixture, wave in waves
    ]


def _all_token_work(module: Module, owners: Mapping[Module, object]) -> int:
    """Multiply-adds for a token that all experts of an MoE module get, if they are calibrated.

    The input Linears of each expert are computed twice.
    """
    if not isinstance(module, LinearExperts):
        return 0
    if all(inner is module or inner not in owners for inner in module.modules()):
        return 0
    form = module.form
    return module.num_experts * form.hidden * form.intermediate * (2 * len(module.input_roles) + 1)


def _shared_inputs(
    own: Mapping[str, Module], together: Iterable[Sequence[str]] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield the names of modules that share an input: fused sets, and all others alone.

    Args:
        own: the modules.
        together: further sets of names that share an input.
    """
    taken: set[str] = set()
    order = {name: place for place, name in enumerate(own)}
    others = {name: names for names in together for name in names}
    for name in own:
        if name in taken:
            continue
        partners = [one for one in others.get(name, fused_partners(name, own)) if one != name]
        members = [name, *(partner for partner in partners if partner in own)]
        found = tuple(sorted(members, key=order.__getitem__))
        taken.update(found)
        yield found


def _group(
    names: Sequence[str],
    modules: Sequence[Module],
    modifiers: Sequence[Modifier],
    owners: Mapping[Module, Sequence[int]],
    data: DataSize,
    seen: float,
) -> Group:
    efforts = []
    for position, modifier in enumerate(modifiers):
        mine = [module for module in modules if position in owners[module]]
        if mine:
            efforts.append(modifier.cost().calibration(mine, data))
    parameters = [one for module in modules for one in own_parameters(module)]
    return Group(
        tuple(modules),
        _sum(efforts),
        sum(one.numel() for one in parameters if one.ndim > 1),
        sum(one.numel() * one.element_size() for one in parameters),
        seen if is_expert(names[0]) else 1.0,
    )


def _sum(efforts: Sequence[CalibrationCost]) -> CalibrationCost:
    if len(efforts) == 1:
        return efforts[0]
    return CalibrationCost(
        gram=sum(one.gram for one in efforts),
        cross=sum(one.cross for one in efforts),
        watch=sum(one.watch for one in efforts),
        solve=sum(one.solve for one in efforts),
        visits=sum(one.visits for one in efforts),
        statistics=sum(one.statistics for one in efforts),
        buffered=sum(one.buffered for one in efforts),
        workspace=max((one.workspace for one in efforts), default=0),
        at_once=max((one.at_once for one in efforts), default=1),
        on_device=max((one.workspace_on(device=True) for one in efforts), default=None),
        kept=sum(one.kept for one in efforts),
        scaled=max((one.scaled for one in efforts), default=0),
        scaled_on_device=max((one.scaled_on(device=True) for one in efforts), default=None),
        outputs=max((one.outputs for one in efforts), default=0),
        running=max((one.running for one in efforts), default=0),
        offloads=any(one.offloads for one in efforts),
        together=any(one.together for one in efforts),
    )


def _units(
    part: Part,
    own: Mapping[str, Module],
    groups: Sequence[Group],
    level: Granularity | None,
    stages: Sequence[Sequence[str]],
) -> Iterator[Unit]:
    if level is Granularity.LINEAR or (level is not None and part.name == REST):
        yield from _units_by_stage(own, groups, stages)
    elif level is Granularity.SUB_BLOCK:
        block = part.modules[part.name]
        stops = list(sub_blocks(block, part.name, set(own.values())))
        for stop in stops:
            inside = set(stop.modules())
            members = tuple(group for group in groups if group.modules[0] in inside)
            if members:
                yield Unit(members)
    elif groups:
        yield Unit(tuple(groups))


def _units_by_stage(
    own: Mapping[str, Module], groups: Sequence[Group], stages: Sequence[Sequence[str]]
) -> Iterator[Unit]:
    """Yield a unit for each group, but a single one for the groups of a wave of experts."""
    stage_of = {
        own[name]: place for place, names in enumerate(stages) for name in names if name in own
    }
    found: dict[object, list[Group]] = {}
    for group in groups:
        found.setdefault(stage_of.get(group.modules[0], group.modules), []).append(group)
    yield from (Unit(tuple(members)) for members in found.values())


def _multiplications(name: str, module: Module, widths: Widths) -> int:
    """Return the multiply-adds per token of a module's own matrices."""
    if isinstance(module, Embedding):
        return 0
    found = 0
    for parameter in own_parameters(module):
        if parameter.ndim == 2:
            found += int(parameter.numel() * (widths.expert_share if is_expert(name) else 1))
        elif parameter.ndim == 3:  # stacked matrices of experts
            found += int(parameter.numel() * widths.expert_share)
    return found


# --------------------
# Time estimate of a run from its operations, its traffic and the machine's measured rates.
#
# Prefetching and writing overlap with the computation of a streamed run; only their excess adds
# time. The rates were measured for a second on an otherwise idle machine, so that the result is an
# estimate within a stated factor.

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


def count_operations(
    passes: Sequence[tuple[PassPlan, Sequence[BlockWork]]],
    tokens: int,
    context: int,
    rounded: int,
    beside: ComputeCost,
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
    beside: ComputeCost,
    tokens: int,
    context: int,
) -> tuple[dict[str, float], Estimate]:
    """Estimate the seconds of each phase, and their total with its range.

    Args:
        rates: measured rates of this machine.
        operations: result of :func:`count_operations`.
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


# --------------------
# Memory and work of learning before a pass, with forwards and backwards through streamed blocks.
#
# ======================
# ========================================================================== held
# during the backward through a part ======================
# ========================================================================== learned parameters
# all the time inputs of blocks        until the backward reaches them, up to the activation budget
# a block's weights       computed from the learned parameters, in the model's dtype a batch's
# activations   read by the backward through a block a weight's workspace    a weight and its
# gradient, in float32 logits                  of the batch, with their gradients, during the
# head's backward ======================
# ==========================================================================

_FORWARDS = 4
"""Of a step, in products: forward, forward again, and a backward to inputs and to weights."""
_MAKINGS = 4
"""Of each weight in a step: three times the weight, once its gradient."""
_SAVED = 1.5
"""Elements that a backward reads, over those that go into Linears and come out of them."""
_LOGITS = 8
"""Bytes per logit in float32, its logarithm and its gradient; beside two of the model's."""
_LOGITS_NARROW = 2


@dataclass(frozen=True)
class LearningContext:
    """Model, data and budget for the estimate of learning.

    Attributes:
        parts: parts of the model.
        works: work of each part.
        tokens: tokens of a batch.
        batches: number of batches.
        width: width of the residual stream.
        itemsize: of the model's dtype.
        expert_share: share of the experts that a token is routed to.
        budget: bytes of activations that stay in memory.
    """

    parts: Sequence[Part]
    works: Sequence[BlockWork]
    tokens: int
    batches: int
    width: int
    itemsize: int
    expert_share: float
    budget: int


@dataclass(frozen=True)
class PartLearning:
    """Memory that a part of the model needs in a learning step.

    Attributes:
        held: bytes of computed weights, then of their gradients.
        workspace: further bytes while a weight is computed, or its gradient is propagated to
            the rotations.
        saved: bytes of activations saved for the backward, freed before the first gradient is
            propagated to the rotations.
    """

    held: int
    workspace: int
    saved: int = 0


def plan_learning(
    modifiers: Sequence[Modifier], context: LearningContext
) -> tuple[LearningPlan | None, list[PartLearning]]:
    """Estimate the learning of a pass's modifiers, and the memory that each part needs for it."""
    found = [(one, learning) for one in modifiers if (learning := one.cost().learning) is not None]
    if not found:
        return None, []
    (modifier, learning), *_ = found
    makings = [modifier.cost().recomputation(list(part.modules.values())) for part in context.parts]
    parts = [
        _part(part, making, context, modifier)
        for part, making in zip(context.parts, makings, strict=True)
    ]
    return _plan(learning, makings, context), parts


def _part(
    part: Part, making: CalibrationCost, context: LearningContext, modifier: Modifier
) -> PartLearning:
    if part.name != REST:
        return PartLearning(making.statistics, making.workspace, _saved_bytes(part, context))
    single = (
        modifier.cost().recomputation([module]).statistics for module in part.modules.values()
    )
    outputs = sum(one.out_features for one in _learned_linears(part))
    logits = context.tokens * outputs * (_LOGITS + _LOGITS_NARROW * context.itemsize)
    return PartLearning(max(single, default=0), max(logits, making.workspace))


def _plan(
    learning: LearningCost, makings: Sequence[CalibrationCost], context: LearningContext
) -> LearningPlan:
    blocks = [part for part in context.parts if part.name != REST]
    compared = 2 * min(learning.compared, context.batches)
    waiting = len(blocks) * context.tokens * context.width * context.itemsize
    per_token = 0  # multiply-adds, with the batch as context
    for part, work in zip(context.parts, context.works, strict=True):
        per_token += work.forward + work.attention * context.tokens
        if part.name == REST:  # the head, which calibration does not run
            per_token += sum(one.in_features * one.out_features for one in _learned_linears(part))
    made = sum(making.solve for making in makings)
    made_times = learning.steps * _MAKINGS + compared
    return LearningPlan(
        steps=learning.steps,
        compared=compared,
        tokens=context.tokens,
        activations=waiting,
        budget=context.budget,
        spilled=max(waiting - context.budget, 0),
        held=learning.held,
        stepping=learning.stepping,
        kept=2 * learning.kept,  # a new file is written before the old one is removed
        read=(2 * learning.steps + compared) * sum(part.source for part in blocks),
        forwards=(learning.steps * _FORWARDS + compared) * context.tokens * per_token,
        products=made_times * made + learning.steps * learning.products,
        visits=made_times * sum(making.visits for making in makings),
    )


def _saved_bytes(part: Part, context: LearningContext) -> int:
    """Bytes of activations that the forward of a block saves for its backward."""
    elements = sum(
        (one.in_features + one.out_features) * (context.expert_share if is_expert(name) else 1)
        for name, one in part.modules.items()
        if isinstance(one, Linear)
    )
    return int(context.tokens * elements * _SAVED * context.itemsize)


def _learned_linears(part: Part) -> list[Linear]:
    return [one for one in part.modules.values() if isinstance(one, Linear)]


# --------------------
# Benchmark of this machine: products, memory and disk, measured in about a second.

_SECONDS = 0.15
"""Of each measurement of products or memory."""
_TOKENS, _WIDTH = 512, 1024
_HEADS, _HEAD = 8, 64
_COPIED = 2**26
_WRITTEN = 2**25
_WRITES = 3


def measure_rates(device: torch.device, dtype: torch.dtype, folder: Path | None = None) -> Rates:
    """Measure products, memory and disk.

    Args:
        device: the device to compute on.
        dtype: of the model.
        folder: a folder on the disk of the output; by default that for temporary files.
    """
    spreads = []
    found = []
    for kind in (dtype, torch.float32):
        with float32_linears():
            rate, spread = _rate(_product(device, kind), _TOKENS * _WIDTH * _WIDTH, device)
        found.append(rate)
        spreads.append(spread)
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    memory, spread = _rate(lambda: target.copy_(source), 2 * _COPIED, device)
    spreads.append(spread)
    between, spread = _rate(_attention(device, dtype), _TOKENS * _TOKENS * _HEADS * _HEAD, device)
    spreads.append(spread)
    amount = CHUNK_TOKENS * (_WIDTH**2 * 36 // 64)  # block rows of a triangle
    moments, spread = _rate(_moments(device, dtype), amount, device)
    spreads.append(spread)
    read, write = _disk(folder)
    worst = max(spreads)
    return Rates(str(device), found[0], found[1], memory, read, write, worst, between, moments)


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    inputs = torch.ones(_TOKENS, _WIDTH, dtype=dtype, device=device)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=device)
    return lambda: torch.nn.functional.linear(inputs, weight)


def _attention(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Causal attention of a sample, counted as products of each token with all before it."""
    states = torch.ones(1, _HEADS, _TOKENS, _HEAD, dtype=dtype, device=device)
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        states, states, states, is_causal=True
    )


def _moments(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    inputs = torch.ones(CHUNK_TOKENS, _WIDTH, dtype=dtype, device=device)
    statistics = InputStatistics(_WIDTH, device)
    return lambda: statistics.update(inputs)


def _rate(work: Callable[[], object], amount: int, device: torch.device) -> tuple[float, float]:
    """Return the median rate of several trials, and the ratio of the best to the worst."""
    work()
    rates: list[float] = []
    begin = time.perf_counter()
    while len(rates) < 3 or time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rates.append(amount / max(time.perf_counter() - start, 1e-9))
    rates.sort()
    tenth = len(rates) // 10
    return rates[len(rates) // 2], rates[-1 - tenth] / rates[tenth]


def _disk(folder: Path | None) -> tuple[float, float]:
    """Measure bytes per second of reading and writing; defaults if writing fails."""
    data = os.urandom(_WRITTEN)
    reads, writes = [], []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".llmcompressor-plan-") as file:
            descriptor = file.fileno()
            for _ in range(_WRITES):
                start = time.perf_counter()
                os.pwrite(descriptor, data, 0)
                os.fsync(descriptor)
                writes.append(_WRITTEN / max(time.perf_counter() - start, 1e-9))
                if hasattr(os, "posix_fadvise"):  # drop the written data from the page cache
                    os.posix_fadvise(descriptor, 0, _WRITTEN, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                done = len(os.pread(descriptor, _WRITTEN, 0))
                reads.append(done / max(time.perf_counter() - start, 1e-9))
    except OSError as error:
        logger.debug(f"The disk could not be measured: {error}")
        return 1e9, 5e8
    return sorted(reads)[_WRITES // 2], sorted(writes)[_WRITES // 2]
