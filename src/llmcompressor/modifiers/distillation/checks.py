# SPDX-License-Identifier: Apache-2.0
"""Checks of the teacher, and of parameters and outputs that have to be trainable."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module
from transformers import TrainingArguments

from llmcompressor.args.renamed import name_among
from llmcompressor.core.state import State
from llmcompressor.errors import ArgumentError, InputError
from llmcompressor.modifiers.distillation.pairing import Pair

__all__ = ["expect_gradient", "expect_whole_parameters", "teacher_of"]


def teacher_of(state: State) -> Module:
    """The session's teacher; refuse a missing or unusable one."""
    teacher = state.teacher_model
    if teacher is None:
        raise ArgumentError(
            "OutputDistillationModifier has no teacher to learn from.",
            "Give train distill_teacher=... (--distill-teacher), a Trainer with the "
            "SessionManagerMixIn teacher=..., session.initialize teacher_model=...",
        )
    if not isinstance(teacher, Module):
        raise ArgumentError(
            f"The teacher is a {type(teacher).__name__} and not a model.",
            "Load it first; only the distill_teacher of train may be a name.",
        )
    if teacher is state.model:
        raise ArgumentError(
            "The teacher is the student itself, so there is nothing to learn.",
            "Give a copy that stays as it is: copy.deepcopy(model).",
        )
    return teacher


def expect_whole_parameters(state: State) -> None:
    """Refuse a learned projection if parameters are sharded outside of their module's forward."""
    strategy = state.hardware.distributed_strategy
    name = {"fsdp": "FSDP", "zero3": "DeepSpeed ZeRO stage 3"}.get(strategy or "")
    if name is not None:
        raise ArgumentError(
            f"A learned projection cannot be used with {name}, which splits its parameters.",
            "Use DDP or ZeRO stage 2, or compare outputs of equal width without a projection.",
        )


def expect_gradient(pair: Pair, output: Tensor) -> None:
    """Refuse an output without a gradient although its module has trainable parameters."""
    trained = any(each.requires_grad for each in pair.student.parameters())
    if trained and not output.requires_grad:
        names = TrainingArguments.__dataclass_fields__
        settings = name_among(names, "activation_checkpointing_kwargs")
        raise InputError(
            f"The output of {pair.label} carries no gradient, so distillation would train nothing.",
            "With activation checkpointing compare whole layers, or set "
            f"{settings}={{'use_reentrant': False}}; otherwise run the student with gradients.",
        )
