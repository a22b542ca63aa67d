# SPDX-License-Identifier: Apache-2.0
"""Plan of the passes over a model: modifiers, pauses and waiting activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.nn import Module

from llmcompressor.args import DatasetArguments
from llmcompressor.core.contract import DataSize, Granularity
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.offload import activation_budget
from llmcompressor.pipelines import infer_pipeline
from llmcompressor.pipelines.granularity import choose_level, count_forwards, target_stops
from llmcompressor.pipelines.moe_lists import needs_block_level
from llmcompressor.pipelines.passes import split_into_passes
from llmcompressor.pipelines.targets import modifier_indices
from llmcompressor.planning.result import PassPlan
from llmcompressor.planning.subject import Part
from llmcompressor.planning.workload import (
    BlockWork,
    LearningContext,
    PartLearning,
    Widths,
    block_works,
    plan_learning,
)

__all__ = ["Learned", "PassContext", "Passes", "plan_passes"]

Passes = list[tuple[PassPlan, list[BlockWork]]]
"""The passes in order, each with the work of every part of the model."""
Learned = dict[int, list[PartLearning]]
"""Number of a pass → what learning before it takes of each part of the model."""


@dataclass(frozen=True)
class PassContext:
    """Inputs for the plan of passes besides the modifiers.

    Attributes:
        state: the state with which the modifiers were initialized.
        args: granularity, targets and budget.
        pipeline: the pipeline to run.
        is_streamed: modifiers that need no data share the pass of a neighbour.
        parts: parts of the model.
        stops: modules of ``sequential_targets``; empty for the decoder layers.
        widths: of the model's forward.
        data: the calibration data.
        longest: tokens of the longest batch.
        batches: number of batches.
        room: bytes that ``max_memory`` leaves for activations; ``None`` without a limit.
    """

    state: State
    args: DatasetArguments
    pipeline: str
    is_streamed: bool
    parts: Sequence[Part]
    stops: Mapping[Module, str]
    widths: Widths
    data: DataSize
    longest: int
    batches: int
    room: int | None


def plan_passes(modifiers: Sequence[Modifier], context: PassContext) -> tuple[Passes, Learned]:
    """Plan the passes of a run, and the learning before them.

    Args:
        modifiers: of the recipe, initialized.
        context: of the run.
    """
    passes: Passes = []
    learned: Learned = {}
    for taking in split_into_passes(modifiers, context.pipeline):
        if not taking:
            continue
        one, works = _plan_pass(taking, context)
        known = LearningContext(
            context.parts,
            works,
            context.longest,
            context.batches,
            context.widths.hidden,
            context.state.model.dtype.itemsize,
            context.widths.expert_share,
            _budget(context),
        )
        learning, parts = plan_learning(taking, known)
        if learning is not None:
            learned[len(passes)] = parts
        passes.append((replace(one, learning=learning), works))
    return passes, learned


def _plan_pass(modifiers: list[Modifier], context: PassContext) -> tuple[PassPlan, list[BlockWork]]:
    name = infer_pipeline(modifiers) if context.pipeline == "independent" else context.pipeline
    names = [type(modifier).__name__ for modifier in modifiers]
    needing = [modifier for modifier in modifiers if modifier.traits.data.collects]
    if name == "datafree" or not needing:
        return PassPlan(names, name), _block_workloads(context, [], {}, None)
    owners = modifier_indices(needing, context.state)
    if name == "basic":
        works = _block_workloads(context, needing, owners, None)
        return PassPlan(names, name, "all at once", "asked for", forwards=1), works
    return _sequential(names, name, needing, owners, context)


def _sequential(
    names: list[str],
    pipeline: str,
    modifiers: list[Modifier],
    owners: dict[Module, list[int]],
    context: PassContext,
) -> tuple[PassPlan, list[BlockWork]]:
    args = context.args
    propagates = args.propagate_error and all(one.traits.propagates_error for one in modifiers)
    streams = 2 if propagates and any(one.traits.twin for one in modifiers) else 1
    selections = [one.select(context.state) for one in modifiers]
    undeclared = not all(one.to_end or one.modules for one in selections)
    model = context.state.model
    at_blocks = needs_block_level(
        model, context.state, modifiers, find_blocks(model), every=args.moe_calibrate_all_experts
    )
    finest = max(one.traits.granularity for one in modifiers)
    budget = _budget(context)
    chosen = choose_level(
        list(owners),
        finest=Granularity.BLOCK if undeclared or at_blocks else finest,
        forced=_forced(pipeline, modifiers, context, owners),
        tokens=context.data.tokens,
        streams=streams,
        budget=budget,
    )
    plan = PassPlan(
        names,
        pipeline,
        str(chosen.level),
        chosen.reason,
        streams,
        count_forwards(chosen.level, streams, propagates=propagates),
        chosen.bytes,
        budget,
        max(chosen.bytes - budget, 0),
    )
    return plan, _block_workloads(context, modifiers, owners, chosen.level)


def _block_workloads(
    context: PassContext,
    modifiers: Sequence[Modifier],
    owners: dict[Module, list[int]],
    level: Granularity | None,
) -> list[BlockWork]:
    return block_works(
        context.parts,
        context.widths,
        modifiers,
        owners,
        level,
        context.data,
        every_expert=context.args.moe_calibrate_all_experts,
    )


def _forced(
    pipeline: str,
    modifiers: Sequence[Modifier],
    context: PassContext,
    owners: Mapping[Module, object],
) -> Granularity | None:
    if pipeline == "layer_sequential":
        return Granularity.BLOCK
    asked, state = context.args.sequential_granularity, context.state
    level = None if asked == "auto" else Granularity(asked)
    if not context.stops:
        return level
    return target_stops(state.model, context.stops, owners, modifiers, state, level)[1]


def _budget(context: PassContext) -> int:
    """Budget in bytes for activations in memory."""
    if context.args.activation_budget is not None:
        return int(context.args.activation_budget)
    if context.room is not None:
        return context.room
    return activation_budget(None)
