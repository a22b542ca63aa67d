# SPDX-License-Identifier: Apache-2.0
"""Meta tensors: placeholders with shapes and dtypes, passed to transformers for loading.

A large MoE has some ten thousand matrices of experts, which transformers stacks: it copies a rule,
starts a job and makes a tensor for each. Where a stack has matrices of one shape, one placeholder
is passed for all of them under the first one's name, and its stack gets the full size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmcompressor.checkpoint.reading import DTYPES
from llmcompressor.checkpoint.source import TensorHeader

__all__ = ["stand_ins"]


def stand_ins(
    headers: Mapping[str, TensorHeader], stacks: Iterable[Sequence[str]] = ()
) -> dict[str, Any]:
    """Return placeholders for all tensors, to pass to ``from_pretrained`` as ``state_dict``.

    Args:
        headers: tensor → its header.
        stacks: names of tensors that are stacked and not converted otherwise before.
    """
    counts: dict[str, int] = {}
    left_out: set[str] = set()
    for names in stacks:
        if len({_form(headers[name]) for name in names}) == 1:
            counts[names[0]] = len(names)
            left_out.update(names[1:])
    made: dict[Any, _StandIn] = {}
    found = {}
    for name, header in headers.items():
        if name not in left_out:
            key = (*_form(header), counts.get(name, 1))
            if key not in made:
                made[key] = _StandIn(*key)
            found[name] = made[key]
    return found


def _form(header: TensorHeader) -> tuple[str, tuple[int, ...]]:
    return header.dtype, tuple(header.shape)


class _StandIn:
    """A placeholder for a slice object of safetensors: transformers reads it by slicing."""

    def __init__(self, dtype: str, shape: Sequence[int], count: int) -> None:
        self.shape = torch.Size(shape)
        self.dtype = DTYPES.get(dtype, torch.uint8)
        self._absent = _absent(self.shape, self.dtype, count)

    def __getitem__(self, index: object) -> Tensor:
        return self._absent


class _Absent(Tensor):
    """A tensor on the meta device that stays there when it is moved.

    Attributes:
        stands_for: number of tensors of one shape and dtype that it represents.
    """

    stands_for: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        as_before: Any = super().__torch_function__
        named = kwargs or {}
        if func is Tensor.to:
            dtype = named.get("dtype")
            if dtype is None or dtype is args[0].dtype:
                return args[0]
            return _absent(args[0].shape, dtype, _count(args[0]))
        if func is torch.stack and len(args) == 1 and set(named) <= {"dim"}:
            stacked = _stacked(args[0], named.get("dim", 0))
            return as_before(func, types, args, named) if stacked is None else stacked
        return as_before(func, types, args, named)


def _absent(shape: Sequence[int], dtype: torch.dtype, stands_for: int = 1) -> _Absent:
    made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Absent)
    made.stands_for = stands_for
    return made


def _count(tensor: Tensor) -> int:
    return getattr(tensor, "stands_for", 1)


def _stacked(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """Stack one placeholder of many tensors; ``None`` for several tensors, which torch stacks."""
    if len(tensors) != 1 or _count(tensors[0]) == 1:
        return None
    shape = list(tensors[0].shape)
    shape.insert(dim, _count(tensors[0]))
    return _absent(shape, tensors[0].dtype)
