# SPDX-License-Identifier: Apache-2.0
"""Manifest of an output: the tensors to write, from the model's structure and schemes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from torch.nn import Embedding, Linear
from transformers import PreTrainedModel

from llmcompressor.checkpoint.compress import (
    QuantizedModule,
    compress,
    parse_format,
    quantized_module,
    quantized_modules,
)
from llmcompressor.checkpoint.contents import Contents, apart, divide
from llmcompressor.checkpoint.extras import extra_ignore, extra_tensors
from llmcompressor.checkpoint.layout import checkpoint_layout, checkpoint_names
from llmcompressor.checkpoint.on_grid import is_on_grid, warn_off_grid
from llmcompressor.checkpoint.output_layout import Stored
from llmcompressor.checkpoint.reading import dtype_name
from llmcompressor.checkpoint.shards import natural_key
from llmcompressor.checkpoint.source import TensorHeader
from llmcompressor.names import named_modules

__all__ = ["Prediction", "module_kinds", "predict", "stored_block"]


@dataclass(frozen=True)
class Prediction:
    """The tensors that the weight files will hold.

    Attributes:
        quantized: the modules that will be quantized, with their schemes.
        stored: all tensors, in the order to store them.
        plain_keys: the model's tensors that are stored unquantized.
        extras: tensors of the source that the model class does not own.
        ignore: patterns that keep the extras unquantized.
        tied: input and output embeddings are one tensor; ``None`` if there is no pair.
        kinds: stored path of a module → its kind, ``linear`` or ``embedding``.
    """

    quantized: Sequence[QuantizedModule]
    stored: Sequence[Stored]
    plain_keys: frozenset[str]
    extras: Sequence[str]
    ignore: Sequence[str]
    tied: bool | None
    kinds: Mapping[str, str] = field(default_factory=dict)


def predict(
    model: PreTrainedModel,
    planned: Sequence[Any],
    headers: Mapping[str, TensorHeader],
    *,
    save_compressed: bool = True,
) -> Prediction:
    """Predict the tensors that the checkpoint will hold, without computing any.

    Args:
        model: the model; its weights may be on the meta device.
        planned: the form in which the modifiers will store its modules
            (:class:`~llmcompressor.modifiers.demands.PlannedModule`). Modules that an earlier
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
    state = _expected_state(model, tensors)
    contents = divide(model, quantized, state)
    stored = _in_order(model, contents)
    names = {one.name for one in stored}
    extras = extra_tensors(model, headers, state, names)
    stored += [Stored(name, headers[name].dtype, headers[name].shape) for name in extras]
    own = checkpoint_names(model, [entry.name for entry in quantized])
    ignore = extra_ignore(extras, names, [*own, *own.values()]) if extras else []
    return Prediction(
        quantized, stored, contents.plain_keys, extras, ignore, contents.tied, module_kinds(model)
    )


def stored_block(
    model: PreTrainedModel,
    block: Mapping[str, Tensor],
    quantized: Sequence[QuantizedModule],
    plain_keys: frozenset[str],
) -> dict[str, Tensor]:
    """Return the tensors of a part of the model in their stored, compressed form.

    Args:
        model: the model.
        block: name in the model → tensor.
        quantized: the quantized modules of this part.
        plain_keys: those of the prediction.

    Returns:
        Stored name → tensor. Compressed tensors are in main memory, so that an accelerator holds
        the codes of one module at a time; the others stay where they are.
    """
    own, rest = apart(quantized, block)
    plain = {key: tensor for key, tensor in rest.items() if key in plain_keys}
    found = checkpoint_layout(model, plain, list(own))
    places = checkpoint_names(model, list(own))
    warn_off_grid(one.name for one in quantized if not is_on_grid(one, own[one.name]))
    for entry in quantized:
        found |= {
            f"{places[entry.name]}.{name}": tensor.detach().to("cpu")
            for name, tensor in compress(entry, own[entry.name]).items()
        }
    return found


def module_kinds(model: PreTrainedModel) -> dict[str, str]:
    """Return the kind of each Linear and embedding, by stored path, as names may mislead."""
    kinds = {
        name: "embedding" if isinstance(module, Embedding) else "linear"
        for name, module in named_modules(model)
        if isinstance(module, Linear | Embedding)
    }
    places = checkpoint_names(model, kinds)
    return {places[name]: kind for name, kind in kinds.items()}


def _expected_state(
    model: PreTrainedModel, tensors: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the state dict that the model will have after the run."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    state = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and name not in ignored
    }
    for module, own in tensors.items():
        state |= {f"{module}.{name}": tensor for name, tensor in own.items()}
    return state


def _in_order(model: PreTrainedModel, contents: Contents) -> list[Stored]:
    places = checkpoint_names(model, contents.compressed)
    pieces = {name: [_stored(name, tensor)] for name, tensor in contents.plain.items()}
    known: dict[object, list[Stored]] = {}  # a model has few forms of modules
    for module, (entry, own) in contents.compressed.items():
        place = places[module]
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in own.items())
        form = (id(entry.scheme), entry.is_attention, entry.has_group, shapes)
        if form not in known:
            on_meta = {name: tensor.to("meta") for name, tensor in own.items()}
            known[form] = [_stored(*each) for each in compress(entry, on_meta).items()]
        pieces[place] = [Stored(f"{place}.{one.name}", *one[1:]) for one in known[form]]
    return [one for name in sorted(pieces, key=natural_key) for one in pieces[name]]


def _stored(name: str, tensor: Tensor) -> Stored:
    return Stored(name, dtype_name(tensor.dtype), tuple(tensor.shape))
