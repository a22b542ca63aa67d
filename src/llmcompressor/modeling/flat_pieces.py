# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3: parameters of which each process holds a flat partition.

Such a parameter is empty except while its module runs, when DeepSpeed's hooks have gathered it.
What persists is one flat partition per process, padded at the end (``ds_tensor``), and the
optimizer's float32 copy of it. These functions are collective: all processes have to call them
alike.

DeepSpeed is optional: it is imported only where a parameter shows that it is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

__all__ = [
    "as_buffers",
    "change_gradient",
    "change_piece",
    "cut",
    "gathered",
    "in_pieces",
    "is_flat",
    "joined",
    "shape_of",
    "shapes_shown",
]


def is_flat(tensor: Any) -> bool:
    """Return True if a parameter is partitioned by ZeRO stage 3."""
    return getattr(tensor, "ds_tensor", None) is not None


def in_pieces(model: Module) -> bool:
    """Return True if any parameter of a model is partitioned by ZeRO stage 3."""
    return any(is_flat(parameter) for parameter in model.parameters())


def shape_of(parameter: Any) -> tuple[int, ...]:
    """The shape of the whole parameter, gathered or not."""
    return tuple(parameter.ds_shape if is_flat(parameter) else parameter.shape)


def gathered(parameter: Any) -> Tensor:
    """The whole parameter: itself where DeepSpeed has gathered it, else a copy."""
    if parameter.numel() == parameter.ds_numel:
        return parameter  # type: ignore[no-any-return]  # what DeepSpeed adds has no types
    from deepspeed.runtime.zero import GatheredParameters  # noqa: PLC0415  # see above

    with torch.no_grad(), GatheredParameters([parameter]):
        return parameter.detach().clone()  # type: ignore[no-any-return]  # the same


def cut(values: Tensor, parameter: Any) -> Tensor:
    """The partition of ``values`` on this process, padded with zeros, like ``parameter``'s.

    Args:
        values: of the shape of the whole parameter, the same on every process.
        parameter: a partitioned parameter.
    """
    piece = parameter.ds_tensor
    size = piece.numel()
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    mine = values.flatten()[rank * size : (rank + 1) * size].to(piece.device)
    return torch.cat([mine, mine.new_zeros(size - mine.numel())])


def joined(piece: Tensor, parameter: Any) -> Tensor:
    """All-gather the partitions of every process into the whole tensor."""
    group = parameter.ds_process_group
    piece = piece.to(parameter.device)
    pieces = [torch.empty_like(piece) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(pieces, piece, group=group)
    return torch.cat(pieces)[: parameter.ds_numel].view(parameter.ds_shape)


@torch.no_grad()
def change_piece(parameter: Any, change: Callable[[Tensor], Any]) -> None:
    """Change this process's partition, and the optimizer's float32 copy of it.

    Args:
        parameter: partitioned; a gathered copy of it is freed.
        change: called with each of the two, which it changes in place.
    """
    change(parameter.ds_tensor)
    if hasattr(parameter, "_z3_optimizer"):
        from deepspeed.utils import (  # noqa: PLC0415  # see above
            safe_get_local_fp32_param,
            safe_set_local_fp32_param,
        )

        copy = safe_get_local_fp32_param(parameter)
        if copy is not None:  # a frozen parameter has none
            change(copy)
            safe_set_local_fp32_param(parameter, copy)
    parameter.partition()


@torch.no_grad()
def change_gradient(parameter: Any, change: Callable[[Tensor], Any]) -> None:
    """Change this process's partition of the gradient, once a step's gradient is complete.

    Args:
        parameter: a partitioned parameter.
        change: called with the partition, which it changes in place.
    """
    if not hasattr(parameter, "_z3_optimizer"):
        return
    from deepspeed.utils import safe_get_local_grad, safe_set_local_grad  # noqa: PLC0415

    gradient = safe_get_local_grad(parameter)
    if gradient is not None:
        change(gradient)
        safe_set_local_grad(parameter, gradient)


@contextmanager
def shapes_shown(model: Module) -> Iterator[None]:
    """Make partitioned parameters report their whole shape in the body.

    Their values are zeros that take no memory: only the shapes may be used.

    Args:
        model: nothing of it is gathered.
    """
    flat = [each for each in model.parameters() if is_flat(each)]
    empty = [(each, each.data) for each in flat if each.shape != shape_of(each)]
    for parameter, data in empty:
        parameter.data = data.new_zeros(()).expand(shape_of(parameter))
    try:
        yield
    finally:
        for parameter, data in empty:
            parameter.data = data


def as_buffers(module: Module) -> None:
    """Turn parameters that were added to a module later into buffers, whole on every process.

    DeepSpeed's hooks treat every parameter of a module as partitioned.
    """
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and not is_flat(parameter):
            del module._parameters[name]
            module.register_buffer(name, parameter.detach())
