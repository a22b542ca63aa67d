# SPDX-License-Identifier: Apache-2.0
"""Partition of a state dict into the tensors of quantized modules and all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.transform import TransformBase
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from llmcompressor.checkpoint.compress import QuantizedModule
from llmcompressor.checkpoint.layout import checkpoint_layout
from llmcompressor.modeling.embeddings import embeddings, says_tied
from llmcompressor.names import named_modules

__all__ = ["Contents", "apart", "divide"]


@dataclass(frozen=True)
class Contents:
    """The partitioned contents of the weight files.

    Attributes:
        plain: stored name → tensor that is not quantized.
        plain_keys: the model's names of the tensors in ``plain``.
        compressed: module name → its entry and its own tensors.
        state: the model's state dict.
        tied: input and output embeddings are one tensor; ``None`` if there is no pair.
    """

    plain: dict[str, Tensor]
    plain_keys: frozenset[str]
    compressed: dict[str, tuple[QuantizedModule, dict[str, Tensor]]]
    state: Mapping[str, Tensor]
    tied: bool | None


def divide(
    model: PreTrainedModel, quantized: Sequence[QuantizedModule], state: Mapping[str, Tensor]
) -> Contents:
    """Partition the state dict into the tensors of quantized modules and all others.

    Args:
        model: the model.
        quantized: its quantized modules.
        state: name → tensor; on the meta device where weights are not loaded.
    """
    own, plain = apart(quantized, state)
    tied = _tie(model, plain, {entry.name for entry in quantized})
    plain = remove_tied_weights_from_state_dict(_with_transforms_once(model, plain), model)
    keys = frozenset(plain)
    names = [entry.name for entry in quantized]
    plain = checkpoint_layout(model, plain, names)
    compressed = {entry.name: (entry, own[entry.name]) for entry in quantized}
    return Contents(plain, keys, compressed, state, tied)


def _with_transforms_once(model: PreTrainedModel, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep each matrix that online rotations share under its first name only.

    transformers drops the other names too, but it tries each of them as a pattern for every other,
    which takes minutes for a few thousand.
    """
    others = {
        f"{name}.{own}"
        for name, module in named_modules(model)
        if isinstance(module, TransformBase)
        for own, first in (getattr(module, "_tied_weights_keys", None) or {}).items()
        if first in plain
    }
    return {key: tensor for key, tensor in plain.items() if key not in others}


def apart(
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
        if module in entries and entries[module].holds(name):
            own[module][name] = tensor
        else:
            plain[key] = tensor
    return own, plain


def _tie(model: PreTrainedModel, plain: dict[str, Tensor], quantized: set[str]) -> bool | None:
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
    can_tie = key_out in (getattr(model, "_tied_weights_keys", None) or {})
    if first is second:
        return True if can_tie else None
    if _is_shared_elsewhere(model, second, key_out):
        return None  # with a decoder's embedding, say, which is not the model's input
    has_bias = getattr(outputs, "bias", None) is not None
    may_tie = can_tie and says_tied(model) and not has_bias
    return may_tie and _made_one(plain, key_in, key_out)


def _made_one(plain: dict[str, Tensor], first: str, second: str) -> bool:
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


def _is_shared_elsewhere(model: PreTrainedModel, parameter: Tensor, own: str) -> bool:
    """Return True if a parameter has another name besides ``own``."""
    every = model.named_parameters(remove_duplicate=False)
    return any(one is parameter and name != own for name, one in every)
