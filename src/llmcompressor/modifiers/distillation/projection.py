# SPDX-License-Identifier: Apache-2.0
"""Maps from the student's features to the teacher's, learned together with the student.

They are parameters of the student's modules while it is trained, so that the optimizer, the
gradient clipping and the checkpoints of a Trainer see them; afterwards they are gone.

They are used in the loss, outside the student's forward. Data parallel training looks through the
graph of the forward's outputs for parameters that get no gradient, and would count those of the
maps among these, or wait for their gradients while nothing is distilled. So the body of the
student gives its output with the maps in its graph, from which they get gradients of zero.
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
    """Refuse a kind or an argument that is not there.

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
    """The learned maps of some pairs, ``[D_teacher, D_student]`` each, in the student's dtype.

    A map begins with orthonormal rows or columns, so that it keeps lengths as far as it can.

    Attributes:
        body: the module of the student below its head; :meth:`join_graph` is a hook for it.

    Args:
        student: the model that learns.
        teacher: the model that it learns from.
        pairs: one map for each module of the student.
        seed: of their first values; the generators of the run are not touched.

    Raises:
        TargetError: a width is not known before the modules run.
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
        """The student's output in the teacher's features: ``[R, D_student] → [R, D_teacher]``."""
        weight: Tensor = getattr(pair.student, self._placed[pair])
        return torch.nn.functional.linear(output.to(weight.dtype), weight)

    def join_graph(self, module: Module, args: tuple[Any, ...], output: Any) -> Any:
        """A forward hook for :attr:`body`, which lies outside of layers that are computed again."""
        weights = [getattr(pair.student, name) for pair, name in self._placed.items()]
        if not weights or not torch.is_grad_enabled():
            return None
        first = main_tensor(output)
        if first is None or not first.is_floating_point():
            return None
        return _exchanged(output, first, touch(first, *weights))

    def remove(self) -> None:
        """Take the parameters off the student's modules."""
        for pair, name in self._placed.items():
            delattr(pair.student, name)
        self._placed.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """The maps by pair."""
        return {
            _key(pair): getattr(pair.student, name).detach().cpu().clone()
            for pair, name in self._placed.items()
        }

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Put the maps of a checkpoint in place; the parameters stay the same objects."""
        for pair, name in self._placed.items():
            if _key(pair) in saved:
                getattr(pair.student, name).copy_(saved[_key(pair)])


def _exchanged(output: Any, old: Tensor, new: Tensor) -> Any:
    """What a module gave, with ``new`` for ``old``."""
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
    """A name that no other distillation of the same module has taken."""
    name, number = _NAME, 1
    while hasattr(module, name):
        number += 1
        name = f"{_NAME}_{number}"
    return name


def _key(pair: Pair) -> str:
    return f"{pair.student_name} -> {pair.teacher_name}"
