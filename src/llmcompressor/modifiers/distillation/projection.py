# SPDX-License-Identifier: Apache-2.0
"""Learned projections from the student's features to the teacher's.

They are parameters of the student's modules during training, so that the optimizer, the gradient
clipping and the checkpoints of a Trainer include them; they are removed afterwards.

They are applied in the loss, outside of the student's forward. Data parallel training searches the
graph of the forward's outputs for parameters without a gradient: it would count the projections
among them, or wait for their gradients while distillation is inactive. So the output of the
student's body is connected to the projections with gradients of zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.modifiers.distillation.capture import main_tensor
from llmcompressor.modifiers.distillation.pairing import Pair, output_width
from llmcompressor.numerics.straight_through import touch

__all__ = ["Projections", "check_projection"]

_NAME = "distillation_projection"
_KINDS = ("identity", "linear")


def check_projection(kind: str | None, arguments: Mapping[str, Any] | None) -> None:
    """Refuse an unknown projection, or an argument that it does not take.

    Raises:
        RecipeError: naming those that are.
    """
    if kind is not None and kind not in _KINDS:
        raise RecipeError(
            f"there is no projection named {kind!r}", f"Choose one of: {', '.join(_KINDS)}."
        )
    allowed = {"seed"} if kind == "linear" else set()
    for key, value in dict(arguments or {}).items():
        if key not in allowed or not isinstance(value, int):
            raise RecipeError(
                f"projection_args has {key!r}: {value!r}",
                "A linear projection takes seed, an integer; others take nothing.",
            )


class Projections:
    """Learned projections of some pairs, ``[D_teacher, D_student]`` each, in the student's dtype.

    They are initialized with orthonormal rows or columns, which preserve lengths as far as
    possible.

    Attributes:
        body: the module of the student below its head; :meth:`join_graph` is a hook for it.

    Args:
        student: the model that is trained.
        teacher: the model that it learns from.
        pairs: one projection for each of them.
        seed: seed of the initial values; the global generators are not used.

    Raises:
        TargetError: a width is unknown before the modules run.
    """

    def __init__(
        self, student: Module, teacher: Module, pairs: Iterable[Pair], seed: int = 0
    ) -> None:
        self._placed: dict[Pair, str] = {}
        self.body: Module = getattr(student, "base_model", student)
        generator = torch.Generator().manual_seed(seed)
        for pair in pairs:
            shape = _shape(student, teacher, pair)
            like = next((each for each in pair.student.parameters()), None)
            first = torch.nn.init.orthogonal_(torch.empty(shape), generator=generator)
            if like is not None:
                first = first.to(device=like.device, dtype=like.dtype)
            name = _free_name(pair.student)
            pair.student.register_parameter(name, Parameter(first))
            self._placed[pair] = name

    def apply(self, pair: Pair, output: Tensor) -> Tensor:
        """Project the student's output, ``[R, D_student] → [R, D_teacher]``."""
        weight: Tensor = getattr(pair.student, self._placed[pair])
        return torch.nn.functional.linear(output.to(weight.dtype), weight)

    def join_graph(self, module: Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of :attr:`body`, which is outside of checkpointed layers."""
        weights = [getattr(pair.student, name) for pair, name in self._placed.items()]
        if not weights or not torch.is_grad_enabled():
            return None
        first = main_tensor(output)
        if first is None or not first.is_floating_point():
            return None
        return _exchanged(output, first, touch(first, *weights))

    def remove(self) -> None:
        """Remove the parameters from the student's modules."""
        for pair, name in self._placed.items():
            delattr(pair.student, name)
        self._placed.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """The projections by pair."""
        return {
            _key(pair): getattr(pair.student, name).detach().cpu().clone()
            for pair, name in self._placed.items()
        }

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Copy the projections of a checkpoint into the existing parameters."""
        for pair, name in self._placed.items():
            if _key(pair) in saved:
                getattr(pair.student, name).copy_(saved[_key(pair)])


def _exchanged(output: Any, old: Tensor, new: Tensor) -> Any:
    """Replace the tensor ``old`` in a module's output by ``new``."""
    if output is old:
        return new
    if isinstance(output, MutableMapping):
        for name in [name for name, value in output.items() if value is old]:
            output[name] = new
        return output
    return type(output)(new if value is old else value for value in output)


def _shape(student: Module, teacher: Module, pair: Pair) -> tuple[int, int]:
    ours, theirs = output_width(student, pair.student), output_width(teacher, pair.teacher)
    if ours is None or theirs is None:
        unknown, role = (
            (pair.student_name, "student") if ours is None else (pair.teacher_name, "teacher")
        )
        raise TargetError(
            f"How many features {unknown} of the {role} gives is not known before it runs, so "
            "no projection can be made for it.",
            "Target decoder layers, Linears or embeddings.",
        )
    return theirs, ours


def _free_name(module: Module) -> str:
    """A parameter name that no other distillation of the same module uses."""
    name, number = _NAME, 1
    while hasattr(module, name):
        number += 1
        name = f"{_NAME}_{number}"
    return name


def _key(pair: Pair) -> str:
    return f"{pair.student_name} -> {pair.teacher_name}"
