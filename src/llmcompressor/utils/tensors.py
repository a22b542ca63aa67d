# SPDX-License-Identifier: Apache-2.0
"""Sparsity of tensors and modules, and moving nested tensors to a device."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.errors import InputError
from llmcompressor.modeling.sharded import gather_full


def tensors_to_device(tensors: Any, device: str | torch.device) -> Any:
    """Move a tensor, or a nested collection of tensors, to a device.

    Args:
        tensors: a tensor; or a mapping, a tuple or another iterable of tensors.
        device: the target device.

    Returns:
        The same structure, as a dictionary, a tuple or a list.

    Raises:
        InputError: it is neither a tensor nor a collection.
    """
    if isinstance(tensors, Tensor):
        return tensors.to(device)
    if isinstance(tensors, Mapping):
        moved = {key: tensors_to_device(value, device) for key, value in tensors.items()}
        return OrderedDict(moved) if isinstance(tensors, OrderedDict) else moved
    if isinstance(tensors, Iterable) and not isinstance(tensors, str):
        values = [tensors_to_device(value, device) for value in tensors]
        return tuple(values) if isinstance(tensors, tuple) else values
    raise InputError(
        f"{type(tensors).__name__} is neither a tensor nor a collection of tensors.",
        "Give tensors.",
    )


@torch.no_grad()
def tensor_sparsity(tens: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Return the share of zeros in a tensor.

    Args:
        tens: the tensor.
        dim: the dimensions to keep, with one share per index; by default one share of all.

    Returns:
        A share, or the shares in the order of ``dim``, float32.

    Raises:
        InputError: the tensor has no such dimension, or one is named twice.
    """
    zeros = gather_full(tens) == 0
    if dim is None:
        return zeros.sum() / zeros.numel()
    kept = [dim] if isinstance(dim, int) else list(dim)
    places = [one % tens.ndim if -tens.ndim <= one < tens.ndim else None for one in kept]
    if None in places or len(set(places)) < len(places):
        raise InputError(
            f"dim is {dim!r}, but the tensor has shape {tuple(tens.shape)}.",
            f"Name dimensions below {tens.ndim}, each once.",
        )
    order = [place for place in places if place is not None]
    rest = [place for place in range(tens.ndim) if place not in order]
    shape = [tens.shape[place] for place in order]
    return zeros.permute(*order, *rest).reshape(*shape, -1).float().mean(dim=-1)


class ModuleSparsificationInfo:
    """The number of parameters of a module, and how many are zero or quantized.

    Args:
        module: the module.
        state_dict: its values, where the module does not hold them itself.
    """

    def __init__(self, module: Module, state_dict: Mapping[str, Tensor] | None = None) -> None:
        self.module = module
        own = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self.trainable_params: dict[str, Tensor] = dict(own if state_dict is None else state_dict)

    @property
    def params_total(self) -> int:
        """Number of elements of the trainable parameters."""
        return sum(one.numel() for one in self.trainable_params.values())

    @cached_property
    def params_sparse(self) -> int:
        """Number of zeros in the trainable parameters."""
        return sum(int((gather_full(one) == 0).sum()) for one in self.trainable_params.values())

    @property
    def params_sparse_percent(self) -> float:
        """Percentage of zeros in the trainable parameters."""
        return 100.0 * self.params_sparse / max(self.params_total, 1)

    @property
    def params_quantized(self) -> int:
        """Number of elements of the parameters of modules with a weight scheme."""
        return sum(
            math.prod(one.shape)
            for module in self.module.modules()
            if getattr(getattr(module, "quantization_scheme", None), "weights", None) is not None
            for one in (getattr(module, "weight", None), getattr(module, "bias", None))
            if isinstance(one, Tensor)
        )

    @property
    def params_quantized_percent(self) -> float:
        """Quantized elements as a percentage of the trainable parameters."""
        return 100.0 * self.params_quantized / max(self.params_total, 1)

    def __str__(self) -> str:
        summary = {
            "total": self.params_total,
            "sparse": self.params_sparse,
            "sparsity_percent": self.params_sparse_percent,
            "quantized": self.params_quantized,
            "quantized_percent": self.params_quantized_percent,
        }
        return json.dumps({"params_summary": summary})
