# SPDX-License-Identifier: Apache-2.0
"""Plan of the passes over a model: modifiers, pauses and waiting activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module

from llmcompressor.args import DatasetArguments
from llmcompressor.core.contract import DataSize, DataUse, Granularity
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.offload import activation_budget
from llmcompressor.pipelines import infer_pipeline
from llmcompressor.pipelines.granularity import choose_level, count_forwards, target_stops
from llmcompressor.pipelines.moe_lists import needs_block_level
from llmcompressor.pipelines.passes import KEPT, split_into_passes
from llmcompressor.pipelines.targets import modifier_indices
from llmcompressor.planning.result import PassPlan
from llmcompressor.planning.subject import Part
from llmcompressor.planning.workload import BlockWork, BlockWorks, Widths

Passes = list[tuple[PassPlan, list[BlockWork]]]
"""The passes in order, each with the work of every part of the model."""


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
        room: bytes that ``max_memory`` leaves for activations; ``None`` without a limit.
        ranks: number of ranks that share the tokens; with several, the share of each group of a
            stop is found too.
        beside: number of them on a node, which divide its free memory.
        known: works that were found before, also for other numbers of ranks.
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
    room: int | None
    ranks: int | None = None
    beside: int = 1
    known: dict[tuple[Any, ...], list[BlockWork]] = field(default_factory=dict)

    @property
    def budget(self) -> int:
        """Bytes of activations that may stay in memory."""
        if self.args.activation_budget is not None:
            return int(self.args.activation_budget)
        return activation_budget(None) // self.beside if self.room is None else self.room

    def works(
        self,
        modifiers: Sequence[Modifier],
        owners: Mapping[Module, Sequence[int]],
        level: Granularity | None,
    ) -> list[BlockWork]:
        """Return the work of each part in a pass of ``modifiers``."""
        key = (*map(id, modifiers), level)
        if key not in self.known:
            every, by_group = self.args.moe_calibrate_all_experts, self.ranks is not None
            work = BlockWorks(self.widths, modifiers, owners, level, self.data, every, by_group)
            self.known[key] = [work(part) for part in self.parts]
        return self.known[key]


def plan_passes(modifiers: Sequence[Modifier], context: PassContext) -> Passes:
    """Plan the passes of a run.

    Args:
        modifiers: of the recipe, initialized.
        context: of the run.
    """
    split = split_into_passes(modifiers, context.pipeline)
    return [_plan_pass(each, context) for each in split if each]


def _plan_pass(modifiers: list[Modifier], context: PassContext) -> tuple[PassPlan, list[BlockWork]]:
    name = infer_pipeline(modifiers) if context.pipeline == "independent" else context.pipeline
    names = [type(modifier).__name__ for modifier in modifiers]
    needing = [modifier for modifier in modifiers if modifier.traits.data.collects]
    if name in ("datafree", KEPT) or not needing:
        learns = any(one.traits.data is DataUse.LEARN_FIRST for one in modifiers)
        waiting = 0
        if learns:  # inputs of blocks, until the backward reaches them
            itemsize = context.state.model.dtype.itemsize
            waiting = (len(context.parts) - 1) * context.longest * context.widths.hidden * itemsize
        budget = context.budget if learns else 0
        spilled = max(waiting - budget, 0)
        plan = PassPlan(names, name, activations=waiting, budget=budget, spilled=spilled)
        return plan, context.works([], {}, None)
    owners = modifier_indices(needing, context.state)
    if name == "basic":
        plan = PassPlan(names, name, "all at once", "asked for", forwards=1)
        return plan, context.works(needing, owners, None)
    return _sequential(names, name, needing, owners, context)


def _sequential(
    names: list[str],
    pipeline: str,
    modifiers: list[Modifier],
    owners: dict[Module, list[int]],
    context: PassContext,
) -> tuple[PassPlan, list[BlockWork]]:
    args, state = context.args, context.state
    propagates = args.propagate_error and all(one.traits.propagates_error for one in modifiers)
    streams = 2 if propagates and any(one.traits.twin for one in modifiers) else 1
    selections = [one.select(state) for one in modifiers]
    undeclared = not all(one.to_end or one.modules for one in selections)
    at_blocks = undeclared or needs_block_level(
        state.model,
        state,
        modifiers,
        find_blocks(state.model),
        every=args.moe_calibrate_all_experts,
    )
    finest = max(one.traits.granularity for one in modifiers)
    chosen = choose_level(
        list(owners),
        finest=Granularity.BLOCK if at_blocks else finest,
        forced=_forced(pipeline, modifiers, context, owners),
        tokens=-(-context.data.tokens // (context.ranks or 1)),
        streams=streams,
        budget=context.budget,
    )
    plan = PassPlan(
        names,
        pipeline,
        str(chosen.level),
        chosen.reason,
        streams,
        count_forwards(chosen.level, streams, propagates=propagates),
        chosen.bytes,
        context.budget,
        max(chosen.bytes - context.budget, 0),
    )
    return plan, context.works(modifiers, owners, chosen.level)


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
