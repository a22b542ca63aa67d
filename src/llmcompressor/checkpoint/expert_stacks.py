# SPDX-License-Identifier: Apache-2.0
"""Fused 3-D expert tensors of a checkpoint, viewed as one matrix per expert and projection.

A stack is a pair of tensors below one module::

    P.gate_up_proj  [experts, 2 * intermediate, hidden]   gate above up
    P.down_proj     [experts, hidden, intermediate]

It becomes ``P.N.gate_proj.weight``, ``P.N.up_proj.weight`` ``[intermediate, hidden]`` and
``P.N.down_proj.weight`` ``[hidden, intermediate]``. Each of them is a contiguous
piece of the file, so only a header with its offset has to be made: no tensor is read as a whole.

The two shapes alone identify this layout: the transposed one, ``[experts, hidden, 2 *
intermediate]``, would need ``intermediate = 0`` to look the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from llmcompressor.checkpoint.source import TensorHeader
from llmcompressor.errors import CheckpointError

__all__ = ["ExpertStack", "find_stacks", "split_stacks"]

_GATE_UP = "gate_up_proj"
_DOWN = "down_proj"
_DIMENSIONS = 3


@dataclass(frozen=True)
class ExpertStack:
    """The fused experts of one MoE.

    Attributes:
        name: the module that holds them.
        gate_up: the gate and up projections, ``None`` if there are none.
        down: the down projections, ``None`` if there are none.
        experts: number of experts.
        problem: the reason why they cannot be unfused; empty if they can.
    """

    name: str
    gate_up: str | None
    down: str | None
    experts: int
    problem: str

    @property
    def modules(self) -> list[str]:
        """Names of the Linears that the stack is unfused into."""
        parts = ("gate_proj", "up_proj", "down_proj")
        return [f"{self.name}.{number}.{part}" for number in range(self.experts) for part in parts]

    @property
    def whole(self) -> list[str]:
        """Names by which a recipe may refer to the fused stack."""
        return [self.name, f"{self.name}.{_GATE_UP}", f"{self.name}.{_DOWN}"]


def find_stacks(headers: Mapping[str, TensorHeader]) -> list[ExpertStack]:
    """Return the fused expert stacks of a checkpoint.

    Args:
        headers: its tensors.
    """
    found: dict[str, dict[str, str]] = {}
    for name, header in headers.items():
        holder, _, own = name.removesuffix(".weight").rpartition(".")
        if len(header.shape) == _DIMENSIONS and holder and own in (_GATE_UP, _DOWN):
            found.setdefault(holder, {})[own] = name
    return [_stack(holder, tensors, headers) for holder, tensors in found.items()]


def split_stacks(
    headers: Mapping[str, TensorHeader], stacks: Collection[ExpertStack]
) -> dict[str, TensorHeader]:
    """Return a checkpoint's tensors with expert stacks replaced by their matrices.

    Args:
        headers: its tensors.
        stacks: the stacks to unfuse.

    Raises:
        CheckpointError: a stack has another layout, or a name is taken already.
    """
    by_tensor = {name: one for one in stacks for name in (one.gate_up, one.down) if name}
    view: dict[str, TensorHeader] = {}
    for name, header in headers.items():
        stack = by_tensor.get(name)
        pieces = {name: header} if stack is None else dict(_pieces(stack, name, header))
        taken = next((piece for piece in pieces if piece in view or piece in headers), None)
        if stack is not None and taken is not None:
            raise CheckpointError(
                f"The experts of {stack.name} are stored together, and {taken} beside them.",
                f"Ignore them: ignore=['re:.*{stack.name}'].",
            )
        view |= pieces
    return view


def _stack(
    holder: str, tensors: Mapping[str, str], headers: Mapping[str, TensorHeader]
) -> ExpertStack:
    experts = max(headers[name].shape[0] for name in tensors.values())
    problem = _problem(holder, tensors, headers)
    return ExpertStack(holder, tensors.get(_GATE_UP), tensors.get(_DOWN), experts, problem)


def _problem(holder: str, tensors: Mapping[str, str], headers: Mapping[str, TensorHeader]) -> str:
    if len(tensors) == 1:
        return f"{next(iter(tensors.values()))} has no partner, so its layout is not known"
    biased = next(
        (f"{holder}.{own}_bias" for own in tensors if f"{holder}.{own}_bias" in headers), None
    )
    if biased is not None:
        return f"they have biases ({biased}), and how such experts interleave gate and up varies"
    gate_up, down = headers[tensors[_GATE_UP]], headers[tensors[_DOWN]]
    experts, rows, hidden = gate_up.shape
    if down.shape == (experts, hidden, rows // 2) and rows % 2 == 0:
        return ""
    shapes = f"{list(gate_up.shape)} and {list(down.shape)}"
    if down.shape == (experts, hidden // 2, rows) and hidden % 2 == 0:
        return f"they are stored transposed ({shapes}), so that a matrix is not in one piece"
    return f"the shapes {shapes} do not belong together"


def _pieces(
    stack: ExpertStack, name: str, header: TensorHeader
) -> Iterator[tuple[str, TensorHeader]]:
    """Yield the matrices of one 3-D tensor, in file order."""
    if stack.problem:
        raise CheckpointError(
            f"The experts of {stack.name} cannot be taken apart: {stack.problem}.",
            f"Ignore them: ignore=['{stack.name}'], or store one matrix per expert.",
        )
    parts = ("gate_proj", "up_proj") if name == stack.gate_up else (_DOWN,)
    experts, rows, columns = header.shape
    size = header.nbytes // (experts * len(parts)) if experts else 0
    for number in range(experts):
        for place, part in enumerate(parts):
            yield (
                f"{stack.name}.{number}.{part}.weight",
                TensorHeader(
                    header.dtype,
                    (rows // len(parts), columns),
                    header.file,
                    header.offset + (number * len(parts) + place) * size,
                    size,
                ),
            )
