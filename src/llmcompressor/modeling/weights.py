# SPDX-License-Identifier: Apache-2.0
"""Input and output embeddings of a model, and the tying of their weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from llmcompressor.modeling.sharded import (
    any_across_ranks,
    gather_full,
    gather_parameter,
    is_dtensor,
    is_partitioned,
    local_shard,
)
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.runtime.threads import parallel_for
from llmcompressor.transformers_internals import declare_ties

# --------------------
# Attributes of a model's configuration, also where they differ by layer.


def text_config(config: Any) -> Any:
    """The text configuration of a model; that of the decoder where there are several.

    Args:
        config: of transformers; one without parts is returned itself.
    """
    find = getattr(config, "get_text_config", None)
    if find is None:
        return config
    try:
        return find()
    except ValueError:  # MusicGen has a text encoder, and a decoder of audio tokens
        return find(decoder=True)


def config_value(config: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute of a configuration; where it differs by layer, the largest value.

    Args:
        config: of transformers, or ``None``.
        name: of the attribute.
        otherwise: the default.
    """
    try:
        return getattr(config, name, otherwise)
    except Exception:  # some answer for single layers alone, as Gemma 4 does for head_dim
        layers = getattr(config, "per_layer_config", ())
        values = [getattr(layer, name, None) for layer in layers]
        numbers = [value for value in values if isinstance(value, int | float)]
        return max(numbers, default=otherwise)


def embeddings(model: Module) -> tuple[Module | None, Module | None]:
    """The modules of the input and of the output embeddings; ``None`` where there is none."""
    found: list[Module | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, getter)()
        except (NotImplementedError, AttributeError):
            module = None
        found.append(module if isinstance(module, Module) else None)
    return found[0], found[1]


def has_tied_embeddings(model: Module) -> bool:
    """Return True if input and output embeddings are two modules that share one weight."""
    inputs, outputs = embeddings(model)
    if inputs is None or outputs is None or inputs is outputs:
        return False
    return getattr(outputs, "weight", None) is getattr(inputs, "weight", None)


def config_ties_embeddings(model: PreTrainedModel) -> bool:
    """Return True if the configuration, or its text part, ties input and output embeddings."""
    holders = (model.config, text_config(model.config))
    return any(getattr(one, "tie_word_embeddings", None) for one in holders)


def untie_embeddings(model: PreTrainedModel) -> bool:
    """Give the output head weights of its own, and update the configuration.

    Other tied weights (the embeddings of an encoder and a decoder, say) are untied too: a loader of
    the new configuration expects each of them.

    Returns:
        True if the embeddings were tied before.
    """
    inputs, outputs = embeddings(model)
    if inputs is None or outputs is None or inputs is outputs:
        return False
    was_tied = has_tied_embeddings(model)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    places: list[tuple[Module, str]] = []
    for target, source in tied.items():
        path, _, own = target.rpartition(".")
        module, (of, _, its) = model.get_submodule(path), source.rpartition(".")
        shared = model.get_submodule(of)._parameters.get(its)
        if own in module._parameters and module._parameters[own] is shared:
            places.append((module, own))
    if has_tied_embeddings(model) and (outputs, "weight") not in places:
        places.append((outputs, "weight"))
    for module, own in places:
        parameter = module.get_parameter(own)
        values = gather_full(parameter).detach().clone()
        module.register_parameter(own, Parameter(values, requires_grad=parameter.requires_grad))
    for config in (model.config, text_config(model.config)):
        if getattr(config, "tie_word_embeddings", None):
            config.tie_word_embeddings = False
    if hasattr(model, "all_tied_weights_keys"):
        declare_ties(model)
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    return was_tied


# --------------------
# Memory alignment of float32 weights on the CPU, for reproducible products.
#
# A product of one row, or with one output, sums in another order where a float32 weight does not
# start at a multiple of the width of the processor's registers. transformers leaves weights where
# their file was mapped, after a header of any length; weights that are loaded block by block have
# memory of their own. Both have to give the same bytes.

_Place = tuple[int, tuple[int, ...], tuple[int, ...]]
_BYTES = 64
"""What torch itself aligns to."""


def align_parameters(model: Module) -> None:
    """Move unaligned float32 CPU parameters of ``model`` to aligned memory; values stay the same.

    Parameters that share their memory keep sharing it. One that partly overlaps another tensor of
    the model stays where it is.
    """
    moved: dict[_Place, Tensor] = {}
    left = _overlapping_tensors(model)
    for parameter in model.parameters():
        if parameter.dtype is not torch.float32 or parameter.device.type != "cpu":
            continue
        place = _memory_key(parameter)
        if parameter.data_ptr() % _BYTES and place not in left:
            if place not in moved:
                moved[place] = parameter.data.clone()
            parameter.data = moved[place]


def _memory_key(tensor: Tensor) -> _Place:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _overlapping_tensors(model: Module) -> set[_Place]:
    """Places of tensors that overlap other tensors in memory without being the same."""
    spans: dict[_Place, tuple[int, int]] = {}
    for one in (*model.parameters(), *model.buffers()):
        if one.device.type == "cpu" and one.layout is torch.strided and one.numel():
            steps = zip(one.shape, one.stride(), strict=True)
            extent = (sum((size - 1) * step for size, step in steps) + 1) * one.element_size()
            spans[_memory_key(one)] = (one.data_ptr(), one.data_ptr() + extent)
    found: set[_Place] = set()
    last, end = None, 0
    for place, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if last is not None and start < end:
            found |= {last, place}
        if stop > end:
            last, end = place, stop
    return found


# --------------------
# Fast detection of NaN and infinity in weights.


def first_nonfinite(
    model: torch.nn.Module, module_names: Iterable[str] | None = None
) -> str | None:
    """The name of the first parameter that holds NaN or infinity.

    Where parameters are sharded over processes, all of them have to call this, and get the same
    answer.

    Args:
        model: the model.
        module_names: look only at these modules' own parameters; all modules if ``None``.

    Returns:
        The parameter's full name, or ``None`` if all are finite.
    """
    names = [name for name, _ in model.named_modules()] if module_names is None else module_names
    every = {
        f"{name}.{own}" if name else own: parameter
        for name in names
        for own, parameter in model.get_submodule(name).named_parameters(recurse=False)
    }
    return next(iter(nonfinite_names(every)), None)


@torch.no_grad()
def nonfinite_names(named: Mapping[str, Tensor]) -> list[str]:
    """The names of the weights that hold NaN or infinity, in their order.

    Args:
        named: weights of any shape, dtype and device. Where they are sharded over processes, all
            processes have to pass the same names in the same order, and get the same answer.
    """
    bad: set[str] = set()

    def look(pair: tuple[str, Tensor]) -> None:
        if not is_finite(pair[1]):
            bad.add(pair[0])

    sharded = torch.distributed.is_available() and torch.distributed.is_initialized()
    parts = list(named.items())
    if sharded:
        parts = [(name, local_shard(one)) for name, one in parts if not is_partitioned(one)]
    # one tensor per thread: threads that share one would wait for the one that reads ahead
    parallel_for(look, [pair for pair in parts if pair[1].device.type == "cpu"])
    for pair in parts:
        if pair[1].device.type != "cpu":
            look(pair)
    if sharded:
        for name, weight in named.items():
            if is_partitioned(weight):
                look((name, gather_parameter(weight)))
        bad |= _nonfinite_on_any_rank(named, bad)
    return [name for name in named if name in bad]


def _nonfinite_on_any_rank(named: Mapping[str, Tensor], bad: Collection[str]) -> set[str]:
    """Names that are bad in any process's shard, by one all-reduce per mesh and device type."""
    found: set[str] = set()
    spread: dict[Any, list[str]] = {}
    for name, weight in named.items():
        if is_dtensor(weight):
            mesh = weight.device_mesh  # type: ignore[attr-defined]  # a DTensor
            spread.setdefault((mesh, local_shard(weight).device.type), []).append(name)
    for names in spread.values():
        marked = any_across_ranks(torch.tensor([name in bad for name in names]), named[names[0]])
        found.update(name for name, one in zip(names, marked.tolist(), strict=True) if one)
    return found
