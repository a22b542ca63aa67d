# SPDX-License-Identifier: Apache-2.0
"""MoE weight layouts: how expert weights are stacked, detected from parameters and forwards.

A stack holds one matrix per expert, ``gate_up_proj`` and ``down_proj`` (``up_proj`` where nothing
is gated)::

    [experts, 2 * intermediate, hidden]   [experts, hidden, intermediate]   as Linears hold them
    [experts, hidden, 2 * intermediate]   [experts, intermediate, hidden]   transposed

No model family is known by name. An MoE is a module with such a pair of parameters, whose forward
takes ``(hidden_states, top_k_index, top_k_weights)``, or rows that are ordered by expert already
(``[experts * tokens, hidden]``).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.nn import Module

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
"""What an expert's Linears do; also what they are called where no other names are known."""

_JOINED = "gate_up_proj"
_STACK = 3
_ROUTED_ARGUMENTS = 3


@dataclass(frozen=True)
class StackedLinear:
    """The location of one of an expert's Linears in the stacked weights.

    Attributes:
        role: :data:`GATE`, :data:`UP` or :data:`DOWN`.
        stack: the parameter that holds it.
        rows: its output features within the stack's matrix.
    """

    role: str
    stack: str
    rows: slice


@dataclass(frozen=True)
class StackLayout:
    """The layout of an MoE's stacked expert weights.

    Attributes:
        experts: how many there are.
        hidden: features of a token.
        intermediate: features between an expert's matrices.
        transposed: a stack's matrices are ``[in, out]``.
        interleaved: gate and up take turns row by row; otherwise gate stands above up.
        gated: there is a gate.
        biased: ``gate_up_proj_bias`` and ``down_proj_bias`` belong to it.
        routed: the forward takes indices and weights; otherwise rows ordered by expert.
    """

    experts: int
    hidden: int
    intermediate: int
    transposed: bool = False
    interleaved: bool = False
    gated: bool = True
    biased: bool = False
    routed: bool = True

    @cached_property
    def parts(self) -> tuple[StackedLinear, ...]:
        """The Linears of one expert, in the order in which they are called."""
        size = self.intermediate
        if not self.gated:
            return StackedLinear(UP, UP, slice(0, size)), StackedLinear(
                DOWN, DOWN, slice(0, self.hidden)
            )
        first, second = slice(0, size), slice(size, 2 * size)
        if self.interleaved:
            first, second = slice(0, 2 * size, 2), slice(1, 2 * size, 2)
        return (
            StackedLinear(GATE, _JOINED, first),
            StackedLinear(UP, _JOINED, second),
            StackedLinear(DOWN, DOWN, slice(0, self.hidden)),
        )

    @cached_property
    def stacks(self) -> tuple[str, ...]:
        """Names of all parameters that hold stacked weights or biases."""
        names = dict.fromkeys(part.stack for part in self.parts)
        return (*names, *(f"{name}_bias" for name in names if self.biased))

    def shape_of(self, stack: str) -> tuple[int, ...]:
        """The shape of one of :attr:`stacks`."""
        first = stack.removesuffix("_bias") != DOWN
        wide = self.intermediate * (2 if self.gated else 1)
        rows, columns = (wide, self.hidden) if first else (self.hidden, self.intermediate)
        if stack.endswith("_bias"):
            return self.experts, rows
        return (self.experts, *((columns, rows) if self.transposed else (rows, columns)))


@dataclass(frozen=True)
class StackedMoE:
    """An MoE with stacked expert weights.

    Attributes:
        name: of the module that holds the stacks.
        module: that module.
        form: the layout; ``None`` if the experts cannot be unfused.
        problem: why they cannot.
    """

    name: str
    module: Module
    form: StackLayout | None
    problem: str = ""


def expert_matrix(stack: Tensor, form: StackLayout, expert: int, part: StackedLinear) -> Tensor:
    """A view of one Linear's weight, ``[out, in]``, or bias, ``[out]``, in its stack."""
    one = stack[expert]
    if one.ndim > 1 and form.transposed:
        one = one.mT
    return one[part.rows]


def expert_matrices(stack: Tensor, form: StackLayout, part: StackedLinear) -> list[Tensor]:
    """Like :func:`expert_matrix`, for every expert."""
    if stack.ndim > 2 and form.transposed:
        stack = stack.mT
    return list(stack[:, part.rows].unbind())


def is_stack(parameter: Any) -> bool:
    """Return True if a parameter is a stack of matrices."""
    return isinstance(parameter, Tensor) and parameter.ndim == _STACK


def detect_layout(module: Module) -> StackLayout | str:
    """The layout of a module's stacked experts, or the reason why it has none."""
    problem = _layout_problem(module)
    if problem:
        return problem
    parameters = module._parameters
    gated = is_stack(parameters.get(_JOINED))
    first, down = parameters[_JOINED if gated else UP], parameters[DOWN]
    assert first is not None
    assert down is not None
    transposed = _is_transposed(first, down, 2) if gated else bool(module.is_transposed)
    if transposed is None:
        shapes = f"{list(first.shape)} and {list(down.shape)}"
        return f"the shapes {shapes} of its stacks do not belong together"
    return StackLayout(
        experts=first.shape[0],
        hidden=first.shape[1 if transposed else 2],
        intermediate=down.shape[1 if transposed else 2],
        transposed=transposed,
        interleaved=gated and not getattr(module, "is_concatenated", True),
        gated=gated,
        biased=parameters.get(f"{DOWN}_bias") is not None,
        routed=len(_forward_arguments(module)) == _ROUTED_ARGUMENTS,
    )


def _layout_problem(module: Module) -> str:
    """Why the parameters and forward of a module are not those of an MoE; empty if they are."""
    present = {key: one for key, one in module._parameters.items() if one is not None}
    gated = is_stack(present.get(_JOINED))
    if not (is_stack(present.get(DOWN)) and (gated or is_stack(present.get(UP)))):
        stacks = [key for key, one in present.items() if is_stack(one)]
        return f"its stacks are {' and '.join(stacks)}, not gate_up_proj and down_proj"
    declared = hasattr(module, "is_transposed") and hasattr(module, "is_concatenated")
    if not gated and (not declared or getattr(module, "has_gate", True)):
        return "it has up_proj and down_proj, and does not say that it has no gate"
    if len(_forward_arguments(module)) not in (1, _ROUTED_ARGUMENTS):
        return "its forward takes neither rows alone nor rows, indices and weights"
    first = _JOINED if gated else UP
    others = present.keys() - {first, DOWN, f"{first}_bias", f"{DOWN}_bias"}
    if others:
        return f"it has further parameters ({', '.join(sorted(others))})"
    if len(present) != len({first, DOWN}) and not declared:
        return "it has biases, and does not say how gate and up lie"
    return ""


def _is_transposed(first: Tensor, down: Tensor, joined: int) -> bool | None:
    """Return True if the stacks are ``[in, out]``, False if ``[out, in]``, ``None`` if neither.

    Where experts are gated, the shapes are never ambiguous.
    """
    experts, rows, columns = first.shape
    if down.shape == (experts, columns, rows // joined) and rows % joined == 0:
        return False
    if down.shape == (experts, columns // joined, rows) and columns % joined == 0:
        return True
    return None


def _forward_arguments(module: Module) -> list[str]:
    return [
        name
        for name, one in inspect.signature(type(module).forward).parameters.items()
        if name != "self" and one.kind is not inspect.Parameter.VAR_KEYWORD
    ]
