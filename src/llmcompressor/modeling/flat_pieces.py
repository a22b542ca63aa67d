# SPDX-License-Identifier: Apache-2.0
"""Parameters of which each process has a flat piece, as of DeepSpeed's ZeRO stage 3.

Such a parameter is empty but while its module runs, when DeepSpeed's hooks have gathered it. What
lasts is a piece of it per process, one dimension and padded at the end (``ds_tensor``), and the
optimizer's float32 copy of that piece. All processes have to call these functions alike.

DeepSpeed is an optional companion: it is imported where a parameter shows that it is at work.
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
    """Whether each process has a flat piece of it."""
    return getattr(tensor, "ds_tensor", None) is not None


def in_pieces(model: Module) -> bool:
    """Whether a model has such parameters."""
    return any(is_flat(parameter) for parameter in model.parameters())


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Of the whole parameter, whatever is in memory of it."""
    return tuple(parameter.ds_shape if is_flat(parameter) else parameter.shape)


def gathered(parameter: Any) -> Tensor:
    """The whole parameter: itself where DeepSpeed has gathered it, else a copy."""
    if parameter.numel() == parameter.ds_numel:
        return parameter  # type: ignore[no-any-return]  # what DeepSpeed adds has no types
    from deepspeed.runtime.zero import GatheredParameters  # noqa: PLC0415  # see above

    with torch.no_grad(), GatheredParameters([parameter]):
        return parameter.detach().clone()  # type: ignore[no-any-return]  # the same


def cut(values: Tensor, parameter: Any) -> Tensor:
    """The piece of ``values`` that this process has, cut as ``parameter`` is; zeros pad it.

    Args:
        values: of the shape of the whole parameter, the same on every process.
        parameter: in flat pieces.
    """
    piece = parameter.ds_tensor
    size = piece.numel()
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    mine = values.flatten()[rank * size : (rank + 1) * size].to(piece.device)
    return torch.cat([mine, mine.new_zeros(size - mine.numel())])


def joined(piece: Tensor, parameter: Any) -> Tensor:
    """The whole of what every process has a piece of, cut as ``parameter`` is."""
    group = parameter.ds_process_group
    piece = piece.to(parameter.device)
    pieces = [torch.empty_like(piece) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(pieces, piece, group=group)
    return torch.cat(pieces)[: parameter.ds_numel].view(parameter.ds_shape)


@torch.no_grad()
def change_piece(parameter: Any, change: Callable[[Tensor], Any]) -> None:
    """Change this process's piece, and the optimizer's float32 copy of it.

    Args:
        parameter: in flat pieces; what was gathered of it is let go.
        change: called with each of the two, changes it in place, and takes the same as the other.
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
    """Change this process's piece of the gradient, when all of a step has come.

    Args:
        parameter: in flat pieces.
        change: called with the piece, which it changes in place.
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
    """Have empty parameters show the shape that they have when they are whole.

    Their values are zeros that take no memory: this is for who asks for shapes alone.

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
    """Keep parameters that were put on a module later as buffers, which every process has whole.

    DeepSpeed's hooks take every parameter of a module for one that is in pieces.
    """
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and not is_flat(parameter):
            del module._parameters[name]
            module.register_buffer(name, parameter.detach())
