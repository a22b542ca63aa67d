# SPDX-License-Identifier: Apache-2.0
"""Unfusing of MoE experts into Linears, in a model and in the map of its checkpoint.

A checkpoint stores the matrices of experts one by one or in stacks. Either way each becomes the
weight of a Linear: by its own name, or as a piece of the stack, read from its place in the file
when it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

from llmcompressor.checkpoint.meta_model import MetaModel
from llmcompressor.checkpoint.names import (
    LoadedName,
    NameMap,
    expert_linear_names,
    stacking_converters,
)
from llmcompressor.checkpoint.source import TensorHeader
from llmcompressor.errors import CheckpointError
from llmcompressor.moe.layouts import StackedLinear, StackedMoE, StackLayout
from llmcompressor.moe.linear_experts import LinearExperts, fuse_experts, unfuse_experts

_PER_EXPERT = re.compile(r"\.(\d+)\.(\w+\.(?:weight|bias))$")


def unfuse_stored_experts(
    model: PreTrainedModel, mixtures: Sequence[StackedMoE]
) -> dict[str, LinearExperts]:
    """Replace ``mixtures`` by experts made of Linears; return the new module of each name."""
    converters = stacking_converters(model) if mixtures else []
    opened = {}
    for mixture in mixtures:
        made = unfuse_experts(mixture, expert_linear_names(mixture, converters))
        model.set_submodule(mixture.name, made)
        opened[mixture.name] = made
    return opened


def fuse_dense_experts(model: PreTrainedModel) -> None:
    """Fuse the experts that are not quantized into stacks again."""
    for name, module in _dense_experts(model):
        model.set_submodule(name, fuse_experts(module))


@contextmanager
def dense_experts_fused(model: PreTrainedModel) -> Iterator[None]:
    """Fuse dense experts as :func:`fuse_dense_experts` does, without data, while the body runs."""
    dense = _dense_experts(model)
    try:
        for name, module in dense:
            model.set_submodule(name, fuse_experts(module, hollow=True))
        yield
    finally:
        for name, module in dense:
            model.set_submodule(name, module)


def _dense_experts(model: PreTrainedModel) -> list[tuple[str, LinearExperts]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, LinearExperts)
        and not any(hasattr(linear, "quantization_scheme") for linear in module.modules())
    ]


def unfuse_meta_model(
    blueprint: MetaModel, mixtures: Sequence[StackedMoE], dense: Collection[str] = ()
) -> str:
    """Unfuse MoEs of a model on the meta device, and map their weights to file offsets.

    Returns the reason why that is impossible, with nothing changed; empty on success. MoEs that are
    ``dense`` are not to be quantized.
    """
    if not mixtures:
        return ""
    model = blueprint.model
    converters = stacking_converters(model)
    names = {one.name: expert_linear_names(one, converters) for one in mixtures}
    finder = _PieceFinder({one.name: one for one in mixtures}, names, model)
    cut: dict[str, list[_PlacedTensor]] = {}
    for name, header in blueprint.source.tensors.items():
        own = blueprint.names.get(name)
        pieces = None if own is None else finder.pieces_of(name, own, header)
        if isinstance(pieces, str):
            return pieces
        if pieces and pieces[0].name != name and own is not None:
            holder = own.target.rpartition(".")[0]
            if holder in dense:
                return f"{name} is a stack of experts that is to be written as one again"
        cut[name] = pieces or [_PlacedTensor(name, own, header)]
    unfuse_stored_experts(model, mixtures)
    split = {name: pieces for name, pieces in cut.items() if pieces[0].name != name}
    owners = {piece.target.rpartition(".")[0] for pieces in split.values() for piece in pieces}
    places = NameMap(model).stored(sorted(owners))
    for name, pieces in split.items():  # named as a checkpoint would name them
        for number, piece in enumerate(pieces):
            module, _, kind = piece.target.rpartition(".")
            cut[name][number] = piece._replace(name=f"{places[module]}.{kind}")
    every = [piece for pieces in cut.values() for piece in pieces]
    tensors = {piece.name: piece.header for piece in every}
    blueprint.source = replace(blueprint.source, tensors=tensors)
    blueprint.names = {piece.name: piece.own for piece in every if piece.own is not None}
    return ""


class _PlacedTensor(NamedTuple):
    """A checkpoint tensor: its new name, the model's tensor it becomes, its place in a file."""

    name: str
    own: LoadedName | None
    header: TensorHeader

    @property
    def target(self) -> str:
        return "" if self.own is None else self.own.target


class _PieceFinder:
    def __init__(
        self,
        mixtures: Mapping[str, StackedMoE],
        names: Mapping[str, Mapping[str, str]],
        model: PreTrainedModel,
    ) -> None:
        self._mixtures = mixtures
        self._names = names
        entries: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
        converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
        # the patterns of tensors that are only transposed while loading
        self._turned = {
            pattern
            for entry in converters
            if all(isinstance(one, Transpose) for one in entry.operations)
            for pattern in entry.source_patterns
        }
        # those of stacks that are concatenated by rows: pattern → (position, count)
        self._joined = {
            pattern: (place, len(entry.source_patterns))
            for entry in converters
            if [type(one) for one in entry.operations] == [Concatenate]
            and getattr(entry.operations[0], "dim", None) == 1
            for place, pattern in enumerate(entry.source_patterns)
        }

    def pieces_of(
        self, name: str, own: LoadedName, header: TensorHeader
    ) -> list[_PlacedTensor] | str | None:
        """Return the matrices in a tensor, a message if they are unknown, or ``None``."""
        holder, _, stack = own.target.rpartition(".")
        mixture = self._mixtures.get(holder)
        if mixture is None or mixture.form is None or stack not in mixture.form.stacks:
            return None
        wanted = mixture.module._parameters[stack]
        assert wanted is not None
        single = _PER_EXPERT.search(name)
        if own.merged and single is not None:
            target = f"{holder}.{single.group(1)}.{single.group(2)}"
            return [_PlacedTensor(name, LoadedName(target, merged=False), header)]
        parts = [one for one in mixture.form.parts if one.stack == stack.removesuffix("_bias")]
        turned: bool | None = False
        if own.pattern in self._joined:  # one of several stacks that are concatenated by rows
            place, count = self._joined[own.pattern]
            experts, rows, columns = wanted.shape
            share = rows // count
            parts = list(_parts_within(parts, place * share, share))
            is_whole = sum(part.rows.stop - part.rows.start for part in parts) == share
            is_known = not mixture.form.transposed and is_whole
            if not is_known or tuple(header.shape) != (experts, share, columns):
                return f"{name} {list(header.shape)} holds no whole matrices of {stack}"
        elif own.merged and own.pattern not in self._turned:
            return f"transformers makes {own.target} of {name} in a way that is not known here"
        else:
            turned = _is_transposed(header, wanted, mixture.form, stack)
            if turned is None:
                return f"{name} has the shape {list(header.shape)}, not {list(wanted.shape)}"
        pieces = []
        for expert in range(mixture.form.experts):
            for part in parts:
                kind = "bias" if stack.endswith("_bias") else "weight"
                target = f"{holder}.{expert}.{self._names[holder][part.role]}.{kind}"
                piece = _piece(header, expert, part.rows, turned=bool(turned))
                placed = LoadedName(target, merged=False)
                pieces.append(_PlacedTensor(f"{name}:{expert}:{part.role}", placed, piece))
        return pieces


def _parts_within(
    parts: Sequence[StackedLinear], first: int, share: int
) -> Iterator[StackedLinear]:
    """Yield the parts in some rows of a stack, with their rows counted from the first of these."""
    for part in parts:
        start, stop = part.rows.start - first, part.rows.stop - first
        if 0 <= start <= stop <= share:
            yield replace(part, rows=slice(start, stop))


def _is_transposed(
    header: TensorHeader, wanted: Tensor, form: StackLayout, stack: str
) -> bool | None:
    """Return True if the file holds matrices ``[in, out]``; ``None`` if it holds something else."""
    if stack.endswith("_bias"):
        return False if tuple(header.shape) == tuple(wanted.shape) else None
    if tuple(header.shape) == tuple(wanted.shape):
        return form.transposed
    if tuple(header.shape) == tuple(wanted.mT.shape):
        return not form.transposed
    return None


def _piece(header: TensorHeader, expert: int, own: slice, *, turned: bool) -> TensorHeader:
    """Return the header of one Linear's part of a stack: a range of the file, or selected rows."""
    experts, *matrix = header.shape
    size = header.nbytes // experts if experts else 0
    rows = len(range(*own.indices(matrix[-1] if turned else matrix[0])))
    shape = (rows, *(matrix[:1] if turned else matrix[1:]))
    nbytes = size // prod(matrix) * prod(shape) if prod(matrix) else 0
    offset = header.offset + expert * size
    if not turned and own.step is None:
        start = own.start * (size // max(matrix[0], 1))
        return TensorHeader(header.dtype, shape, header.file, offset + start, nbytes)
    rows_of = (own.start, own.stop, own.step or 1)
    place = (header.file, offset, nbytes, tuple(matrix), turned, rows_of)
    return TensorHeader(header.dtype, shape, *place)


# Fused 3-D expert tensors of a checkpoint, viewed as one matrix per expert and projection.
#
# ``P.gate_up_proj`` ``[experts, 2 * intermediate, hidden]`` (gate above up) and ``P.down_proj``
# ``[experts, hidden, intermediate]`` become ``P.N.gate_proj.weight``, ``P.N.up_proj.weight`` and
# ``P.N.down_proj.weight``. Each is a contiguous piece of the file: no tensor is read as a whole.
# The two shapes alone identify this layout: the transposed one, ``[experts, hidden, 2 *
# intermediate]``, would need ``intermediate = 0`` to look the same. Granite's ``P.input_linear``
# and ``P.output_linear`` are the same two, and become ``P.experts.N…``, as its class has them.

_DOWN = "down_proj"
_DIMENSIONS = 3
_STACK = re.compile(
    r"(?P<holder>.+)\.(?:(?P<first>gate_up_proj)|down_proj)"
    r"|(?P<granite>.+\.block_sparse_moe)\.(?:(?P<input>input_linear)|output_linear)"
)


@dataclass(frozen=True)
class FusedExperts:
    """The fused experts of one MoE: their module and its tensors (``None`` if absent).

    ``problem`` is the reason why they cannot be unfused; empty if they can.
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
        stored = (self.gate_up, self.down)
        return [self.name, *(name.removesuffix(".weight") for name in stored if name)]


def find_fused_experts(headers: Mapping[str, TensorHeader]) -> list[FusedExperts]:
    """Return the fused expert stacks of a checkpoint with these tensors."""
    found: dict[str, dict[bool, str]] = {}
    for name, header in headers.items():
        match = _STACK.fullmatch(name.removesuffix(".weight"))
        if len(header.shape) == _DIMENSIONS and match is not None:
            holder = match["holder"] or f"{match['granite']}.experts"
            found.setdefault(holder, {})[bool(match["first"] or match["input"])] = name
    fused = []
    for holder, tensors in found.items():
        gate_up, down = tensors.get(True), tensors.get(False)
        shapes = [headers[name].shape for name in (gate_up, down) if name]
        experts, rows, hidden = shapes[0]
        is_known = shapes[1:] == [(experts, hidden, rows // 2)] and rows % 2 == 0
        biased = [name for name in tensors.values() if f"{name}_bias" in headers]
        told = " and ".join(str(list(shape)) for shape in shapes)
        problem = (
            "with biases, gate and up interleave in some models"
            if biased
            else f"{told} is no pair of [experts, 2 * intermediate, hidden] and "
            "[experts, hidden, intermediate], whose matrices are in one piece"
        )
        is_whole = is_known and not biased
        fused.append(FusedExperts(holder, gate_up, down, experts, "" if is_whole else problem))
    return fused


def split_fused_experts(
    headers: Mapping[str, TensorHeader], stacks: Collection[FusedExperts]
) -> dict[str, TensorHeader]:
    """Return tensors with expert stacks replaced by their matrices; CheckpointError if it fails."""
    by_tensor = {name: one for one in stacks for name in (one.gate_up, one.down) if name}
    view: dict[str, TensorHeader] = {}
    for name, header in headers.items():
        stack = by_tensor.get(name)
        if stack is None:
            view[name] = header
            continue
        if stack.problem:
            raise CheckpointError(
                f"The experts of {stack.name} cannot be taken apart: {stack.problem}.",
                f"Ignore them: ignore=['{stack.name}'], or store one matrix per expert.",
            )
        parts = ("gate_proj", "up_proj") if name == stack.gate_up else (_DOWN,)
        share = header.shape[1] // len(parts)
        for number, (place, part) in product(range(header.shape[0]), enumerate(parts)):
            own = slice(place * share, (place + 1) * share)
            piece = f"{stack.name}.{number}.{part}.weight"
            if piece in view or piece in headers:
                raise CheckpointError(
                    f"The experts of {stack.name} are stored together, and {piece} beside them.",
                    f"Ignore them: ignore=['re:.*{stack.name}'].",
                )
            view[piece] = _piece(header, number, own, turned=False)
    return view
