# SPDX-License-Identifier: Apache-2.0
"""The tensors that an output will hold, from the model's structure and schemes alone."""

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
from llmcompressor.checkpoint.tensor_files import (
    StoredTensor,
    natural_key,
    stored_form,
    torch_dtype,
)
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.weights import config_ties_embeddings, embeddings
from llmcompressor.transformers_internals import declare_ties, not_saved, tied_keys


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
    """Partition a state dict, also of meta tensors, by quantized modules and all others."""
    declare_ties(model)
    own, plain = _split_quantized(quantized, state)
    tied = _resolve_tie(model, plain, {entry.name for entry in quantized})
    # Of a matrix that online rotations share, only the first name. transformers drops the other
    # names too, but tries each as a pattern for every other, minutes for a few thousand.
    others = {
        f"{name}.{other}"
        for name, module in named_modules(model)
        if isinstance(module, TransformBase)
        for other, first in tied_keys(module).items()
        if first in plain
    }
    plain = {key: tensor for key, tensor in plain.items() if key not in others}
    plain = remove_tied_weights_from_state_dict(plain, model)
    keys, names = frozenset(plain), NameMap(model)
    plain = names.layout(plain, [entry.name for entry in quantized])
    compressed = {entry.name: (entry, own[entry.name]) for entry in quantized}
    return PartitionedState(plain, keys, compressed, state, tied, names)


def _split_quantized(
    quantized: Sequence[QuantizedModule], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
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
    requested. ``None`` if the model has no such pair, or shares it in a way of its own.
    """
    inputs, outputs = embeddings(model)
    first, second = getattr(inputs, "weight", None), getattr(outputs, "weight", None)
    is_pair = first is not None and second is not None and inputs is not outputs
    names = {id(module): name for name, module in named_modules(model)}
    name_in, name_out = names.get(id(inputs)), names.get(id(outputs))
    if is_pair and {name_in, name_out} & quantized:
        return False
    key_in, key_out = f"{name_in}.weight", f"{name_out}.weight"
    can_tie = key_out in tied_keys(model)
    if first is second and is_pair and can_tie:
        return True
    every = model.named_parameters(remove_duplicate=False)
    # tied to a decoder's embedding, say, which is not the model's input
    is_elsewhere = any(one is second and name != key_out for name, one in every)
    if not is_pair or first is second or is_elsewhere:
        return None
    has_bias = getattr(outputs, "bias", None) is not None
    may_tie = can_tie and config_ties_embeddings(model) and not has_bias
    # the state's tensors are compared: the model's own may be sharded over processes
    one, other = plain.get(key_in), plain.get(key_out)
    if not may_tie or one is None or other is None:
        return False
    if one.is_meta or other.is_meta or not torch.equal(one, other):
        return False
    plain[key_out] = one
    return True


@dataclass(frozen=True)
class PlannedTensors:
    """The tensors that the weight files will hold.

    Attributes:
        quantized: the modules that will be quantized, with their schemes.
        stored: all tensors, in the order to store them.
        plain_keys: the model's tensors that are stored unquantized.
        extras: tensors of the source that the model class does not own, and their places there.
        ignore: patterns that keep the extras unquantized.
        tied: input and output embeddings are one tensor; ``None`` if there is no pair.
        kinds: stored path of a module → its kind, ``linear`` or ``embedding``.
        left: tensors of the source that are not stored, and that nothing removed on purpose.
        origins: weight file of the source → stored modules that are made of it, if it has several.
    """

    quantized: Sequence[QuantizedModule]
    stored: Sequence[StoredTensor]
    plain_keys: frozenset[str]
    extras: Mapping[str, TensorHeader]
    ignore: Sequence[str]
    tied: bool | None
    kinds: Mapping[str, str] = field(default_factory=dict)
    left: Sequence[str] = ()
    origins: Mapping[str, Sequence[str]] = field(default_factory=dict)


def plan_tensors(
    model: PreTrainedModel,
    planned: Sequence[Any],
    headers: Mapping[str, TensorHeader],
    *,
    save_compressed: bool = True,
) -> PlannedTensors:
    """Predict the tensors that the checkpoint will hold, without computing any.

    ``planned`` is the form in which the modifiers will store modules of the model, perhaps on the
    meta device (:class:`~llmcompressor.core.contract.PlannedModule`). Modules that an earlier run
    quantized are written unchanged. ``headers`` are the tensors of the source.
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
    # the state dict that the model will have after the run
    ignored = not_saved(model)
    state = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and name not in ignored
    }
    for module, own in tensors.items():
        state |= {f"{module}.{name}": tensor for name, tensor in own.items()}
    return planned_tensors(
        model, partition_state_dict(model, quantized, state), lambda written: headers
    )


def planned_tensors(
    model: PreTrainedModel,
    contents: PartitionedState,
    headers_beside: Callable[[set[str]], Mapping[str, TensorHeader]],
) -> PlannedTensors:
    """Return the planned tensors of a partitioned state dict, whose values are not read.

    ``headers_beside`` returns the source's tensors, given the names of the stored ones; those that
    the model does not own are stored too.
    """
    quantized = [entry for entry, _ in contents.compressed.values()]
    stored = _sorted_tensors(contents)
    names = {one.name for one in stored}
    headers = headers_beside(names)
    extras, left = extra_tensors(model, headers, contents.state, names)
    for name in extras:
        torch_dtype(name, headers[name])  # refused before the work
    stored += [StoredTensor(name, headers[name].dtype, headers[name].shape) for name in extras]
    own = contents.names.stored([entry.name for entry in quantized])
    ignore = extra_ignore_patterns(extras, names, [*own, *own.values()]) if extras else []
    return PlannedTensors(
        quantized,
        stored,
        contents.plain_keys,
        {name: headers[name] for name in extras},
        ignore,
        contents.tied,
        module_kinds(model),
        left,
        _origins(contents, stored, headers),
    )


def _origins(
    contents: PartitionedState, stored: Sequence[StoredTensor], headers: Mapping[str, TensorHeader]
) -> dict[str, list[str]]:
    """Return the stored modules that are made of each file, by the model's modules between them."""
    if len({header.file for header in headers.values()}) < 2:
        return {}
    files: dict[str, set[str]] = {}
    for name, loaded in contents.names.loaded(headers, contents.state).items():
        files.setdefault(loaded.target.rpartition(".")[0], set()).add(headers[name].file.name)
    places = contents.names.stored(contents.compressed)
    modules = {place: name for name, place in places.items()}
    plain = contents.names.loaded((one.name for one in stored), contents.state)
    found: dict[str, set[str]] = {}
    for name, place in ((one.name, one.name.rpartition(".")[0]) for one in stored):
        target = plain[name].target.rpartition(".")[0] if name in plain else place
        module = modules.get(place, target)
        own = {headers[name].file.name} if name in headers else set()
        while module and module not in files:  # of a stack, its experts are made
            module = module.rpartition(".")[0]
        for file in own or files.get(module, set()):
            found.setdefault(file, set()).add(place)
    return {file: sorted(found[file], key=natural_key) for file in sorted(found)}


def compress_block(
    names: NameMap,
    block: Mapping[str, Tensor],
    quantized: Sequence[QuantizedModule],
    plain_keys: frozenset[str],
) -> dict[str, Tensor]:
    """Return the tensors of a part of the model in their stored, compressed form, by stored name.

    Compressed tensors are in main memory, so that an accelerator holds the codes of one module at a
    time; the others stay where they are. ``quantized`` are the part's quantized modules.
    """
    own, rest = _split_quantized(quantized, block)
    plain = {key: tensor for key, tensor in rest.items() if key in plain_keys}
    found = names.layout(plain, list(own))
    for packed in packed_modules(names, {one.name: (one, own[one.name]) for one in quantized}):
        found |= {name: tensor.detach().to("cpu") for name, tensor in packed.items()}
    return found


def packed_modules(
    names: NameMap, modules: Mapping[str, tuple[QuantizedModule, Mapping[str, Tensor]]]
) -> Iterator[dict[str, Tensor]]:
    """Yield the stored tensors of quantized modules, each packed only when it is reached."""
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
    return StoredTensor(name, *stored_form(tensor))
