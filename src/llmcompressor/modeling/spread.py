# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors of FSDP 2 and ZeRO stage 3: gathered, and sharded again.

============  ==========================  ====================================
by            a parameter is              this process's part of it
============  ==========================  ====================================
FSDP 2        a ``DTensor``               its local tensor
ZeRO stage 3  empty outside of a forward  a piece of one dimension, ``ds_tensor``
============  ==========================  ====================================

Both are recognized by their attributes: importing their modules would load all of
torch.distributed, or DeepSpeed. The functions are collective: all processes call them alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.flat_pieces import (
    change_piece,
    cut,
    gathered,
    in_pieces,
    is_flat,
    joined,
)

__all__ = [
    "is_in_parts",
    "is_spread",
    "is_spread_as",
    "local",
    "on_any",
    "spread_as",
    "together",
    "was_loaded_spread",
    "whole",
    "whole_state",
    "write",
    "zero",
]


def was_loaded_spread(model: Any) -> bool:
    """Return True if transformers sharded the model when loading it (``distributed_config``).

    No one else gathers it then: all processes save it together.
    """
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def is_spread(model: Any) -> bool:
    """Return True if a model is sharded, so that no process holds all of it."""
    if was_loaded_spread(model):
        return True
    if not isinstance(model, Module):
        return False
    return in_pieces(model) or any(map(is_in_parts, model.parameters()))


def is_in_parts(tensor: Any) -> bool:
    """Return True if a tensor is a ``DTensor``."""
    return hasattr(tensor, "full_tensor")


def on_any(marked: Tensor, spread: Any) -> Tensor:
    """All-reduce a mask: True where it is True on any process with a shard of ``spread``.

    Args:
        marked: bool [N], the mask of this process.
        spread: a ``DTensor``.

    Returns:
        bool [N], alike on all of them.
    """
    counts = marked.to(local(spread).device, torch.int32)
    for dimension in range(spread.device_mesh.ndim):
        torch.distributed.all_reduce(counts, group=spread.device_mesh.get_group(dimension))
    return counts > 0


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all processes, or the tensor itself; it is read-only."""
    if is_in_parts(tensor):
        return tensor.full_tensor()  # type: ignore[no-any-return,attr-defined]  # a DTensor
    return gathered(tensor) if is_flat(tensor) else tensor


@torch.no_grad()
def whole_state(model: Module, *, keep: bool) -> dict[str, Tensor]:
    """The full state dict of a model, gathered parameter by parameter.

    Args:
        model: its parameters may be sharded.
        keep: return the state on this process; the others get an empty one.

    Returns:
        The state dict, in main memory.
    """
    state: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        if id(value) not in known:
            one = whole(value)
            known[id(value)] = one.detach().cpu() if keep else one.new_empty(0)
        if keep:
            state[name] = known[id(value)]
    return state


def local(tensor: Any) -> Tensor:
    """The shard of this process, which shares memory with the tensor, or the tensor itself."""
    if is_flat(tensor):
        return tensor.ds_tensor.data  # type: ignore[no-any-return]  # DeepSpeed has no types
    return tensor.to_local() if is_in_parts(tensor) else tensor  # type: ignore[no-any-return]


def spread_as(values: Tensor, parameter: Any) -> Tensor:
    """Shard ``values``, which every process has whole, like ``parameter``, on its device."""
    if is_flat(parameter):
        return cut(values, parameter)
    if not is_in_parts(parameter):
        return values.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # see above

    # Every process slices its own shard, without communication.
    return distribute_tensor(
        values.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )


def is_spread_as(part: Tensor, parameter: Any) -> bool:
    """Return True if ``part`` is sharded like ``parameter``, by :func:`spread_as`."""
    mine = local(parameter) if is_flat(parameter) else parameter
    if part.device != mine.device or (is_flat(parameter) and part.shape != mine.shape):
        return False
    return is_in_parts(part) == is_in_parts(mine)


def together(part: Tensor, parameter: Any) -> Tensor:
    """Gather what :func:`spread_as` sharded."""
    if is_flat(parameter) and is_spread_as(part, parameter):
        return joined(part, parameter)
    return whole(part)


@torch.no_grad()
def write(target: Any, values: Tensor) -> None:
    """Write ``values``, which every process has whole, into the sharded ``target``."""
    part = spread_as(values, target)
    if is_flat(target):
        change_piece(target, lambda piece: piece.copy_(part))
    else:
        local(target.data).copy_(local(part))


@torch.no_grad()
def zero(target: Any) -> None:
    """Set a sharded ``target`` to zero."""
    if is_flat(target):
        change_piece(target, Tensor.zero_)
    else:
        target.zero_()
