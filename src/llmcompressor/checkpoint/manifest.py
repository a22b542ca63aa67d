# SPDX-License-Identifier: Apache-2.0
"""Manifest of an output: the tensors to write, from the model's structure and schemes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.transform import TransformBase
from torch import Tensor
from torch.nn import Embedding, Linear
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from llmcompressor.checkpoint.names import NameMap
from llmcompressor.checkpoint.packing import (
    QuantizedModule,
    compress,
    is_on_grid,
    parse_format,
    quantized_module,
    quantized_modules,
    warn_off_grid,
)
from llmcompressor.checkpoint.side_files import extra_ignore_patterns, extra_tensors
from llmcompressor.checkpoint.source import TensorHeader
from llmcompressor.checkpoint.tensor_files import StoredTensor, dtype_name, natural_key
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.weights import config_ties_embeddings, embeddings
from llmcompressor.transformers_internals import not_saved, tied_keys

__all__ = [
    "OutputManifest",
    "PartitionedState",
    "build_manifest",
    "compress_block",
    "manifest_of",
    "module_kinds",
    "packed_modules",
    "partition_state_dict",
    "split_quantized",
]


# --------------------
# Partition of a state dict into the tensors of quantized modules and all others.


@dataclass(frozen=True)
class PartitionedState:
    """The partitioned contents of the weight files.

    Attributes:
        plain: stored name → tensor that is not quantized.
        plain_keys: the model's names of the tensors in ``plain``.
        compressed: module name → its entry and its own tensors.
        state: the model's state dict.
        tied: input and output embeddings are one tensor; ``None`` if there is no pair.
        names: the names of the model.
    """

    plain: dict[str, Tensor]
    plain_keys: frozenset[str]
    compressed: dict[str, tuple[QuantizedModule, dict[str, Tensor]]]
    state: Mapping[str, Tensor]
    tied: bool | None
    names: NameMap


def partition_state_dict(
    model: PreTrainedModel, quantized: Sequence[QuantizedModule], state: Mapping[str, Tensor]
) -> PartitionedState:
    """Partition the state dict into the tensors of quantized modules and all others.

    Args:
        model: the model.
        quantized: its quantized modules.
        state: name → tensor; on the meta device where weights are not loaded.
    """
    own, plain = split_quantized(quantized, state)
    tied = _resolve_tie(model, plain, {entry.name for entry in quantized})
    plain = remove_tied_weights_from_state_dict(_drop_shared_transforms(model, plain), model)
    keys = frozenset(plain)
    names = [entry.name for entry in quantized]
    own_names = NameMap(model)
    plain = own_names.layout(plain, names)
    compressed = {entry.name: (entry, own[entry.name]) for entry in quantized}
    return PartitionedState(plain, keys, compressed, state, tied, own_names)


def _drop_shared_transforms(
    model: PreTrainedModel, plain: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Keep each matrix that online rotations share under its first name only.

    transformers drops the other names too, but it tries each of them as a pattern for every other,
    which takes minutes for a few thousand.
    """
    others = {
        f"{name}.{own}"
        for name, module in named_modules(model)
        if isinstance(module, TransformBase)
        for own, first in tied_keys(module).items()
        if first in plain
    }
    return {key: tensor for key, tensor in plain.items() if key not in others}


def split_quantized(
    quantized: Sequence[QuantizedModule], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Split tensors into those of quantized modules and all others.

    Returns:
        Quantized module → own name → tensor; and name in the model → tensor.
    """
    entries = {entry.name: entry for entry in quantized}
    own: dict[str, dict[str, Tensor]] = {name: {} for name in entries}
    plain = {}
    for key, tensor in tensors.items():
        module, _, name = key.rpartition(".")
        if module in entries and entries[module].owns_tensor(name):
            own[module][name] = tensor
        else:
            plain[key] = tensor
    return own, plain


def _resolve_tie(
    model: PreTrainedModel, plain: dict[str, Tensor], quantized: set[str]
) -> bool | None:
    """Return True if one tensor serves as input and output embeddings.

    Equal tensors are merged if the configuration ties them. Otherwise they stay two, as the user
    requested.

    Returns:
        ``None`` if the model has no such pair, or shares it in a way of its own.
    """
    inputs, outputs = embeddings(model)
    first, second = getattr(inputs, "weight", None), getattr(outputs, "weight", None)
    if first is None or second is None or inputs is outputs:
        return None
    names = {id(module): name for name, module in named_modules(model)}
    name_in, name_out = names.get(id(inputs)), names.get(id(outputs))
    if {name_in, name_out} & quantized:
        return False
    key_in, key_out = f"{name_in}.weight", f"{name_out}.weight"
    can_tie = key_out in tied_keys(model)
    if first is second:
        return True if can_tie else None
    every = model.named_parameters(remove_duplicate=False)
    if any(one is second and name != key_out for name, one in every):
        return None  # with a decoder's embedding, say, which is not the model's input
    has_bias = getattr(outputs, "bias", None) is not None
    may_tie = can_tie and config_ties_embeddings(model) and not has_bias
    return may_tie and _merge_if_equal(plain, key_in, key_out)


def _merge_if_equal(plain: dict[str, Tensor], first: str, second: str) -> bool:
    """Make ``second`` the same tensor as ``first`` if they are equal; return True if they are.

    The state's tensors are compared: the model's own may be sharded over processes, and only this
    process is here.
    """
    if not {first, second} <= set(plain):
        return False
    one, other = plain[first], plain[second]
    if one.is_meta or other.is_meta or one.shape != other.shape or not torch.equal(one, other):
        return False
    plain[second] = one
    return True


# --------------------
# Manifest of an output: the tensors to write, from the model's structure and schemes alone.


@dataclass(frozen=True)
class OutputManifest:
    """The tensors that the weight files will hold.

    Attributes:
        quantized: the modules that will be quantized, with their schemes.
        stored: all tensors, in the order to store them.
        plain_keys: the model's tensors that are stored unquantized.
        extras: tensors of the source that the model class does not own, and their places there.
        ignore: patterns that keep the extras unquantized.
        tied: input and output embeddings are one tensor; ``None`` if there is no pair.
        kinds: stored path of a module → its kind, ``linear`` or ``embedding``.
    """

    quantized: Sequence[QuantizedModule]
    stored: Sequence[StoredTensor]
    plain_keys: frozenset[str]
    extras: Mapping[str, TensorHeader]
    ignore: Sequence[str]
    tied: bool | None
    kinds: Mapping[str, str] = field(default_factory=dict)


def build_manifest(
    model: PreTrainedModel,
    planned: Sequence[Any],
    headers: Mapping[str, TensorHeader],
    *,
    save_compressed: bool = True,
) -> OutputManifest:
    """Predict the tensors that the checkpoint will hold, without computing any.

    Args:
        model: the model; its weights may be on the meta device.
        planned: the form in which the modifiers will store its modules
            (:class:`~llmcompressor.core.contract.PlannedModule`). Modules that an earlier
            run quantized are written unchanged.
        headers: the tensors of the source.
        save_compressed: pack the weights instead of writing them dense.
    """
    forced = parse_format(None if save_compressed else "dense")
    quantized, tensors = [], {}
    shared: dict[tuple[int, str], QuantizationScheme] = {}  # modules of one scheme share one copy
    copies: dict[int, QuantizationScheme] = {}
    for plan in planned:
        is_weight = isinstance(plan.module, Linear | Embedding)
        if is_weight and id(plan.scheme) in copies:
            quantized.append(QuantizedModule(plan.name, plan.module, copies[id(plan.scheme)]))
            tensors[plan.name] = plan.tensors
            continue
        entry = quantized_module(
            plan.name, plan.module, plan.scheme, has_group=plan.has_group, forced_format=forced
        )
        if entry is not None:
            key = (id(plan.scheme), str(entry.scheme.format))
            entry = replace(entry, scheme=shared.setdefault(key, entry.scheme))
            if is_weight:
                copies[id(plan.scheme)] = entry.scheme
            quantized.append(entry)
            tensors[plan.name] = plan.tensors
    order = {name: position for position, (name, _) in enumerate(named_modules(model))}
    planned_modules = {plan.module for plan in planned}
    for entry in quantized_modules(model, forced_format=forced):
        if entry.module not in planned_modules and entry.name in order:
            quantized.append(entry)
            tensors[entry.name] = {}
    quantized.sort(key=lambda entry: order[entry.name])
    contents = partition_state_dict(model, quantized, _expected_state(model, tensors))
    return manifest_of(model, contents, lambda written: headers)


def manifest_of(
    model: PreTrainedModel,
    contents: PartitionedState,
    headers_beside: Callable[[set[str]], Mapping[str, TensorHeader]],
) -> OutputManifest:
    """Return the manifest of a partitioned state dict.

    Args:
        model: the model.
        contents: its tensors; their values are not read.
        headers_beside: from the names of the model's stored tensors to the source's tensors, of
            which those that the model does not own are stored too.
    """
    quantized = [entry for entry, _ in contents.compressed.values()]
    stored = _sorted_tensors(contents)
    names = {one.name for one in stored}
    headers = headers_beside(names)
    extras = extra_tensors(model, headers, contents.state, names)
    stored += [StoredTensor(name, headers[name].dtype, headers[name].shape) for name in extras]
    own = contents.names.stored([entry.name for entry in quantized])
    ignore = extra_ignore_patterns(extras, names, [*own, *own.values()]) if extras else []
    return OutputManifest(
        quantized,
        stored,
        contents.plain_keys,
        {name: headers[name] for name in extras},
        ignore,
        contents.tied,
        module_kinds(model),
    )


def compress_block(
    names: NameMap,
    block: Mapping[str, Tensor],
    quantized: Sequence[QuantizedModule],
    plain_keys: frozenset[str],
) -> dict[str, Tensor]:
    """Return the tensors of a part of the model in their stored, compressed form.

    Args:
        names: the names of the model.
        block: name in the model → tensor.
        quantized: the quantized modules of this part.
        plain_keys: those of the prediction.

    Returns:
        Stored name → tensor. Compressed tensors are in main memory, so that an accelerator holds
        the codes of one module at a time; the others stay where they are.
    """
    own, rest = split_quantized(quantized, block)
    plain = {key: tensor for key, tensor in rest.items() if key in plain_keys}
    found = names.layout(plain, list(own))
    for packed in packed_modules(names, {one.name: (one, own[one.name]) for one in quantized}):
        found |= {name: tensor.detach().to("cpu") for name, tensor in packed.items()}
    return found


def packed_modules(
    names: NameMap, modules: Mapping[str, tuple[QuantizedModule, Mapping[str, Tensor]]]
) -> Iterator[dict[str, Tensor]]:
    """Yield the stored tensors of quantized modules, each packed only when it is reached.

    Args:
        names: the names of the model.
        modules: name → its entry and its own tensors.
    """
    places = names.stored(modules)
    off_grid = []
    for name, (entry, own) in modules.items():
        if not is_on_grid(entry, own):
            off_grid.append(name)
        yield {f"{places[name]}.{key}": tensor for key, tensor in compress(entry, own).items()}
    warn_off_grid(off_grid)


def module_kinds(model: PreTrainedModel) -> dict[str, str]:
    """Return the kind of each Linear and embedding, by stored path, as names may mislead."""
    kinds = {
        name: "embedding" if isinstance(module, Embedding) else "linear"
        for name, module in named_modules(model)
        if isinstance(module, Linear | Embedding)
    }
    places = NameMap(model).stored(kinds)
    return {places[name]: kind for name, kind in kinds.items()}


def _expected_state(
    model: PreTrainedModel, tensors: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the state dict that the model will have after the run."""
    ignored = not_saved(model)
    state = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and name not in ignored
    }
    for module, own in tensors.items():
        state |= {f"{module}.{name}": tensor for name, tensor in own.items()}
    return state


def _sorted_tensors(contents: PartitionedState) -> list[StoredTensor]:
    places = contents.names.stored(contents.compressed)
    pieces = {name: [_stored(name, tensor)] for name, tensor in contents.plain.items()}
    known: dict[object, list[StoredTensor]] = {}  # a model has few forms of modules
    for module, (entry, own) in contents.compressed.items():
        place = places[module]
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in own.items())
        form = (id(entry.scheme), entry.is_attention, entry.has_group, shapes)
        if form not in known:
            on_meta = {name: tensor.to("meta") for name, tensor in own.items()}
            known[form] = [_stored(*each) for each in compress(entry, on_meta).items()]
        pieces[place] = [StoredTensor(f"{place}.{one.name}", *one[1:]) for one in known[form]]
    return [one for name in sorted(pieces, key=natural_key) for one in pieces[name]]


def _stored(name: str, tensor: Tensor) -> StoredTensor:
    return StoredTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape))
