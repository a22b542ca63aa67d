# SPDX-License-Identifier: Apache-2.0
"""Memory and work of learning before a pass, with forwards and backwards through streamed blocks.

======================  ==========================================================================
held                    during the backward through a part
======================  ==========================================================================
learned parameters      all the time
inputs of blocks        until the backward reaches them, up to the activation budget
a block's weights       computed from the learned parameters, in the model's dtype
a batch's activations   read by the backward through a block
a weight's workspace    a weight and its gradient, in float32
logits                  of the batch, with their gradients, during the head's backward
======================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.nn import Linear

from llmcompressor.modeling.fused import is_expert
from llmcompressor.modifiers.demands import Effort, Learning
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.planning.result import LearningPlan
from llmcompressor.planning.subject import REST, Part
from llmcompressor.planning.workload import BlockWork

__all__ = ["LearningContext", "PartLearning", "plan_learning"]

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
    found = [(one, learning) for one in modifiers if (learning := one.learning()) is not None]
    if not found:
        return None, []
    (modifier, learning), *_ = found
    makings = [modifier.making(list(part.modules.values())) for part in context.parts]
    parts = [
        _part(part, making, context, modifier)
        for part, making in zip(context.parts, makings, strict=True)
    ]
    return _plan(learning, makings, context), parts


def _part(part: Part, making: Effort, context: LearningContext, modifier: Modifier) -> PartLearning:
    if part.name != REST:
        return PartLearning(making.statistics, making.workspace, _saved(part, context))
    single = (modifier.making([module]).statistics for module in part.modules.values())
    return PartLearning(max(single, default=0), max(_logits(part, context), making.workspace))


def _plan(learning: Learning, makings: Sequence[Effort], context: LearningContext) -> LearningPlan:
    blocks = [part for part in context.parts if part.name != REST]
    compared = 2 * min(learning.compared, context.batches)
    waiting = len(blocks) * context.tokens * context.width * context.itemsize
    per_token = sum(_per_token(context))
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


def _per_token(context: LearningContext) -> Iterator[int]:
    """Yield the multiply-adds per token of each part, with the batch as context."""
    for part, work in zip(context.parts, context.works, strict=True):
        yield work.forward + work.attention * context.tokens
        if part.name == REST:  # the head, which calibration does not run
            yield sum(one.in_features * one.out_features for one in _linears(part))


def _saved(part: Part, context: LearningContext) -> int:
    """Bytes of activations that the forward of a block saves for its backward."""
    elements = sum(
        (one.in_features + one.out_features) * (context.expert_share if is_expert(name) else 1)
        for name, one in part.modules.items()
        if isinstance(one, Linear)
    )
    return int(context.tokens * elements * _SAVED * context.itemsize)


def _logits(part: Part, context: LearningContext) -> int:
    outputs = sum(one.out_features for one in _linears(part))
    return context.tokens * outputs * (_LOGITS + _LOGITS_NARROW * context.itemsize)


def _linears(part: Part) -> list[Linear]:
    return [one for one in part.modules.values() if isinstance(one, Linear)]
