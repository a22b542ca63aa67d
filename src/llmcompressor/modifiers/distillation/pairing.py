# SPDX-License-Identifier: Apache-2.0
"""Pairing of student and teacher modules, with a check of their widths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Embedding, Module

from llmcompressor.errors import TargetError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.embeddings import embeddings
from llmcompressor.modeling.matching import match_named_modules, near_matches

__all__ = ["Pair", "Target", "check_widths", "output_width", "pair_modules"]

Target = str | tuple[str, str]
"""A pattern for both models, or one for the student and one for the teacher."""


@dataclass(frozen=True)
class Pair:
    """A module of the student and the teacher module that it learns from."""

    student_name: str
    student: Module
    teacher_name: str
    teacher: Module

    @property
    def label(self) -> str:
        """Name of the pair in metrics and messages."""
        return self.student_name or type(self.student).__name__


def pair_modules(student: Module, teacher: Module, targets: Sequence[Target] | None) -> list[Pair]:
    """Pair the modules that the targets match, in the order of the targets and of the models.

    Args:
        student: the model that is trained.
        teacher: the model that it learns from.
        targets: default: the output heads, whose outputs are the logits.

    Raises:
        TargetError: a target matches nothing, or different numbers of modules in the two models.
    """
    if targets is None:
        return [Pair(*_head(student, "student"), *_head(teacher, "teacher"))]
    pairs: dict[tuple[str, str], Pair] = {}
    for target in targets:
        ours, theirs = (target, target) if isinstance(target, str) else target
        found, aims = _matched(student, ours, "student"), _matched(teacher, theirs, "teacher")
        if len(found) != len(aims):
            raise TargetError(
                f"The layers do not pair: {ours!r} matches {_listed(found)} of the student, "
                f"{theirs!r} {_listed(aims)} of the teacher.",
                "Give a pair [student, teacher] of targets that match as many modules of each, "
                "for instance every second layer of a teacher that is twice as deep.",
            )
        for (name, module), (aim_name, aim) in zip(found, aims, strict=True):
            pairs.setdefault((name, aim_name), Pair(name, module, aim_name, aim))
    return list(pairs.values())


def _matched(model: Module, target: str, role: str) -> list[tuple[str, Module]]:
    found = list(match_named_modules(model, target))
    if not found:
        raise TargetError(
            f"The target {target!r} matches no module of the {role} ({type(model).__name__}).",
            near_matches(model, target),
        )
    return found


def _head(model: Module, role: str) -> tuple[str, Module]:
    head = embeddings(model)[1]
    for name, module in model.named_modules():
        if head is not None and module is head:
            return name, module
    raise TargetError(
        f"The {role} ({type(model).__name__}) does not say which module gives its logits.",
        'Name it: targets: ["re:.*lm_head$"].',
    )


def _listed(found: Sequence[tuple[str, Module]]) -> str:
    ends = found[0][0] if len(found) == 1 else f"{found[0][0]} … {found[-1][0]}"
    return f"{len(found)} module{'s' * (len(found) > 1)} ({ends})"


# ---- widths


def output_width(model: Module, module: Module) -> int | None:
    """Number of features of a module's output, ``None`` if unknown before it runs."""
    if isinstance(module, Embedding):
        return module.embedding_dim
    features = getattr(module, "out_features", None)
    if isinstance(features, int):
        return features
    if module in find_blocks(model):
        width = getattr(_text_config(model), "hidden_size", None)
        return width if isinstance(width, int) else None
    return None


def check_widths(student: Module, teacher: Module, pairs: Sequence[Pair]) -> None:
    """Refuse pairs whose outputs have different known widths.

    Raises:
        TargetError: the first such pair.
    """
    for pair in pairs:
        ours, theirs = output_width(student, pair.student), output_width(teacher, pair.teacher)
        if ours is None or theirs is None or ours == theirs:
            continue
        if _is_head(student, pair.student) or _is_head(teacher, pair.teacher):
            raise TargetError(
                f"The student has a vocabulary of {ours} ({pair.student_name}), the teacher one "
                f"of {theirs} ({pair.teacher_name}): their logits cannot be compared.",
                "Take a teacher with the student's tokenizer; where only the padding of the "
                "vocabulary differs, call teacher.resize_token_embeddings.",
            )
        raise TargetError(
            f"{pair.student_name} of the student gives {ours} features, {pair.teacher_name} of "
            f"the teacher {theirs}.",
            "Set projection: linear, which learns a map from one to the other, or compare the "
            "logits.",
        )


def _is_head(model: Module, module: Module) -> bool:
    return embeddings(model)[1] is module


def _text_config(model: Module) -> Any:
    config = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    return find() if find is not None else config
