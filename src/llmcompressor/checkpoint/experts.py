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
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

from llmcompressor.checkpoint.blueprint import Blueprint
from llmcompressor.checkpoint.expert_names import part_names, stacking_converters
from llmcompressor.checkpoint.layout import LoadedName, checkpoint_names
from llmcompressor.checkpoint.source import PieceHeader, TensorHeader
from llmcompressor.modeling.expert_forms import Mixture, Part, StackForm
from llmcompressor.modeling.experts import LinearExperts, put_together, take_apart

__all__ = ["close_dense", "dense_closed", "open_blueprint", "open_experts"]

_PER_EXPERT = re.compile(r"\.(\d+)\.(\w+\.(?:weight|bias))$")


def open_experts(model: PreTrainedModel, mixtures: Sequence[Mixture]) -> dict[str, LinearExperts]:
    """Replace ``mixtures`` by experts made of Linears.

    Returns:
        Name → the new module.
    """
    converters = stacking_converters(model) if mixtures else []
    opened = {}
    for mixture in mixtures:
        made = take_apart(mixture, part_names(mixture, converters))
        model.set_submodule(mixture.name, made)
        opened[mixture.name] = made
    return opened


def close_dense(model: PreTrainedModel) -> None:
    """Fuse the experts that are not quantized into stacks again."""
    for name, module in _dense(model):
        model.set_submodule(name, put_together(module))


@contextmanager
def dense_closed(model: PreTrainedModel) -> Iterator[None]:
    """Fuse dense experts as :func:`close_dense` does, without data, while the body runs."""
    dense = _dense(model)
    try:
        for name, module in dense:
            model.set_submodule(name, put_together(module, hollow=True))
        yield
    finally:
        for name, module in dense:
            model.set_submodule(name, module)


def _dense(model: PreTrainedModel) -> list[tuple[str, LinearExperts]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, LinearExperts)
        and not any(hasattr(linear, "quantization_scheme") for linear in module.modules())
    ]


def open_blueprint(
    blueprint: Blueprint, mixtures: Sequence[Mixture], dense: Collection[str] = ()
) -> str:
    """Unfuse MoEs of a model on the meta device, and map their weights to file offsets.

    Args:
        blueprint: the model.
        mixtures: the MoEs that can be unfused.
        dense: names of the MoEs that are not to be quantized.

    Returns:
        The reason why it is impossible, with nothing changed; empty on success.
    """
    if not mixtures:
        return ""
    model = blueprint.model
    converters = stacking_converters(model)
    names = {one.name: part_names(one, converters) for one in mixtures}
    finder = _Finder({one.name: one for one in mixtures}, names, model)
    cut: dict[str, list[_Placed]] = {}
    for name, header in blueprint.source.tensors.items():
        own = blueprint.names.get(name)
        pieces = None if own is None else finder.pieces_of(name, own, header)
        if isinstance(pieces, str):
            return pieces
        if pieces and pieces[0].name != name and own is not None:
            holder = own.target.rpartition(".")[0]
            if holder in dense:
                return f"{name} is a stack of experts that is to be written as one again"
        cut[name] = pieces or [_Placed(name, own, header)]
    open_experts(model, mixtures)
    _rename(model, cut)
    every = [piece for pieces in cut.values() for piece in pieces]
    tensors = {piece.name: piece.header for piece in every}
    blueprint.source = replace(blueprint.source, tensors=tensors)
    blueprint.names = {piece.name: piece.own for piece in every if piece.own is not None}
    return ""


def _rename(model: PreTrainedModel, cut: dict[str, list[_Placed]]) -> None:
    """Give pieces of stacks the names that a checkpoint would have for them."""
    split = {name: pieces for name, pieces in cut.items() if pieces[0].name != name}
    targets = {piece.target for pieces in split.values() for piece in pieces}
    modules = {target.rpartition(".")[0] for target in targets}
    places = checkpoint_names(model, sorted(modules))
    for name, pieces in split.items():
        cut[name] = [
            piece._replace(name=f"{places[module]}.{kind}")
            for piece in pieces
            for module, _, kind in [piece.target.rpartition(".")]
        ]


class _Placed(NamedTuple):
    """A checkpoint tensor: its new name, the model's tensor it becomes, its place in a file."""

    name: str
    own: LoadedName | None
    header: TensorHeader

    @property
    def target(self) -> str:
        """Name of the model's tensor that it becomes; empty without one."""
        return "" if self.own is None else self.own.target


class _Finder:
    """Maps checkpoint tensors to the Linears of unfused MoEs."""

    def __init__(
        self,
        mixtures: Mapping[str, Mixture],
        names: Mapping[str, Mapping[str, str]],
        model: PreTrainedModel,
    ) -> None:
        self._mixtures = mixtures
        self._names = names
        self._turned = _only_turned(model)
        self._joined = _only_joined(model)

    def pieces_of(
        self, name: str, own: LoadedName, header: TensorHeader
    ) -> list[_Placed] | str | None:
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
            return [_Placed(name, LoadedName(target, merged=False), header)]
        if own.pattern in self._joined:
            place, count = self._joined[own.pattern]
            return self._cut_joined(mixture, stack, name, header, place, count)
        if own.merged and own.pattern not in self._turned:
            return f"transformers makes {own.target} of {name} in a way that is not known here"
        turned = _is_turned(header, wanted, mixture.form, stack)
        if turned is None:
            return f"{name} has the shape {list(header.shape)}, not {list(wanted.shape)}"
        return list(self._cut(mixture, stack, name, header, turned=turned))

    def _cut_joined(
        self, mixture: Mixture, stack: str, name: str, header: TensorHeader, place: int, count: int
    ) -> list[_Placed] | str:
        """Return the matrices in one of ``count`` stacks that are concatenated by rows."""
        form, wanted = mixture.form, mixture.module._parameters[stack]
        assert form is not None
        assert wanted is not None
        experts, rows, columns = wanted.shape
        share = rows // count
        if form.transposed or tuple(header.shape) != (experts, share, columns):
            return f"{name} has the shape {list(header.shape)}, not {[experts, share, columns]}"
        first = place * share
        own = [
            replace(part, rows=slice(part.rows.start - first, part.rows.stop - first))
            for part in form.parts
            if part.stack == stack and first <= part.rows.start <= part.rows.stop <= first + share
        ]
        if sum(part.rows.stop - part.rows.start for part in own) != share:
            return f"{name} holds no whole matrices of {stack}"
        return list(self._cut(mixture, stack, name, header, turned=False, parts=own))

    def _cut(
        self,
        mixture: Mixture,
        stack: str,
        name: str,
        header: TensorHeader,
        *,
        turned: bool,
        parts: Sequence[Part] | None = None,
    ) -> Iterator[_Placed]:
        form = mixture.form
        assert form is not None
        kind = "bias" if stack.endswith("_bias") else "weight"
        for expert in range(form.experts):
            for part in form.parts if parts is None else parts:
                if part.stack == stack.removesuffix("_bias"):
                    own = self._names[mixture.name][part.role]
                    target = f"{mixture.name}.{expert}.{own}.{kind}"
                    piece = _piece(header, expert, part, turned=turned)
                    placed = LoadedName(target, merged=False)
                    yield _Placed(f"{name}:{expert}:{part.role}", placed, piece)


def _is_turned(header: TensorHeader, wanted: Tensor, form: StackForm, stack: str) -> bool | None:
    """Return True if the file holds matrices ``[in, out]``; ``None`` if it holds something else."""
    if stack.endswith("_bias"):
        return False if tuple(header.shape) == tuple(wanted.shape) else None
    if tuple(header.shape) == tuple(wanted.shape):
        return form.transposed
    if tuple(header.shape) == tuple(wanted.mT.shape):
        return not form.transposed
    return None


def _piece(header: TensorHeader, expert: int, part: Part, *, turned: bool) -> TensorHeader:
    """Return the header of one Linear's part of a stack: a range of the file, or selected rows."""
    experts, *matrix = header.shape
    size = header.nbytes // experts if experts else 0
    rows = len(range(*part.rows.indices(matrix[-1] if turned else matrix[0])))
    shape = (rows, *(matrix[:1] if turned else matrix[1:]))
    nbytes = size // prod(matrix) * prod(shape) if prod(matrix) else 0
    offset = header.offset + expert * size
    if not turned and part.rows.step is None:
        start = part.rows.start * (size // matrix[0])
        return TensorHeader(header.dtype, shape, header.file, offset + start, nbytes)
    return PieceHeader(
        header.dtype,
        shape,
        header.file,
        offset,
        nbytes,
        matrix=tuple(matrix),
        turned=turned,
        rows=(part.rows.start, part.rows.stop, part.rows.step or 1),
    )


def _only_joined(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return the patterns of stacks that are concatenated by rows: pattern → (position, count)."""
    entries: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return {
        pattern: (place, len(entry.source_patterns))
        for entry in entries
        if isinstance(entry, WeightConverter)
        and [type(one) for one in entry.operations] == [Concatenate]
        and getattr(entry.operations[0], "dim", None) == 1
        for place, pattern in enumerate(entry.source_patterns)
    }


def _only_turned(model: PreTrainedModel) -> set[str]:
    """Return the patterns of tensors that are only transposed while loading."""
    entries: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return {
        pattern
        for entry in entries
        if isinstance(entry, WeightConverter)
        and all(isinstance(one, Transpose) for one in entry.operations)
        for pattern in entry.source_patterns
    }
