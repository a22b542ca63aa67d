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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

# --------------------
# ZeRO stage 3: parameters of which each process holds a flat partition.
#
# Such a parameter is empty except while its module runs, when DeepSpeed's hooks have gathered it.
# What persists is one flat partition per process, padded at the end (``ds_tensor``), and the
# optimizer's float32 copy of it. These functions are collective: all processes have to call them
# alike.
#
# DeepSpeed is optional: it is imported only where a parameter shows that it is in use.


def is_partitioned(tensor: Any) -> bool:
    """Return True if a parameter is partitioned by ZeRO stage 3."""
    return getattr(tensor, "ds_tensor", None) is not None


def has_partitioned_parameters(model: Module) -> bool:
    """Return True if any parameter of a model is partitioned by ZeRO stage 3."""
    return any(is_partitioned(parameter) for parameter in model.parameters())


def full_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the whole parameter, gathered or not."""
    return tuple(parameter.ds_shape if is_partitioned(parameter) else parameter.shape)


def gather_parameter(parameter: Any) -> Tensor:
    """The whole parameter: itself where DeepSpeed has gathered it, else a copy."""
    if parameter.numel() == parameter.ds_numel:
        return parameter  # type: ignore[no-any-return]  # what DeepSpeed adds has no types
    from deepspeed.runtime.zero import GatheredParameters  # noqa: PLC0415  # see above

    with torch.no_grad(), GatheredParameters([parameter]):
        return parameter.detach().clone()  # type: ignore[no-any-return]  # the same


def partition_of(values: Tensor, parameter: Any) -> Tensor:
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


def all_gather_partitions(piece: Tensor, parameter: Any) -> Tensor:
    """All-gather the partitions of every process into the whole tensor."""
    group = parameter.ds_process_group
    piece = piece.to(parameter.device)
    pieces = [torch.empty_like(piece) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(pieces, piece, group=group)
    return torch.cat(pieces)[: parameter.ds_numel].view(parameter.ds_shape)


@torch.no_grad()
def update_partition(parameter: Any, change: Callable[[Tensor], Any]) -> None:
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
def update_gradient_partition(parameter: Any, change: Callable[[Tensor], Any]) -> None:
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
def full_shapes_reported(model: Module) -> Iterator[None]:
    """Make partitioned parameters report their whole shape in the body.

    Their values are zeros that take no memory: only the shapes may be used.

    Args:
        model: nothing of it is gathered.
    """
    flat = [each for each in model.parameters() if is_partitioned(each)]
    empty = [(each, each.data) for each in flat if each.shape != full_shape(each)]
    for parameter, data in empty:
        parameter.data = data.new_zeros(()).expand(full_shape(parameter))
    try:
        yield
    finally:
        for parameter, data in empty:
            parameter.data = data


def convert_to_buffers(module: Module) -> None:
    """Turn parameters that were added to a module later into buffers, whole on every process.

    DeepSpeed's hooks treat every parameter of a module as partitioned.
    """
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and not is_partitioned(parameter):
            del module._parameters[name]
            module.register_buffer(name, parameter.detach())


def was_loaded_sharded(model: Any) -> bool:
    """Return True if transformers sharded the model when loading it (``distributed_config``).

    No one else gathers it then: all processes save it together.
    """
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def is_sharded(model: Any) -> bool:
    """Return True if a model is sharded, so that no process holds all of it."""
    if was_loaded_sharded(model):
        return True
    if not isinstance(model, Module):
        return False
    return has_partitioned_parameters(model) or any(map(is_dtensor, model.parameters()))


def is_dtensor(tensor: Any) -> bool:
    """Return True if a tensor is a ``DTensor``."""
    return hasattr(tensor, "full_tensor")


def is_fsdp_module(module: Module) -> bool:
    """Return True for a module that FSDP 2 has made one of its own class."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def reshard(model: Module) -> None:
    """Make all parameters of FSDP 2 shards: those of the root are whole after a forward."""
    for module in model.modules():
        if is_fsdp_module(module):
            one: Any = module
            one.reshard()


def any_across_ranks(marked: Tensor, spread: Any) -> Tensor:
    """All-reduce a mask: True where it is True on any process with a shard of ``spread``.

    Args:
        marked: bool [N], the mask of this process.
        spread: a ``DTensor``.

    Returns:
        bool [N], alike on all of them.
    """
    counts = marked.to(local_shard(spread).device, torch.int32)
    for dimension in range(spread.device_mesh.ndim):
        torch.distributed.all_reduce(counts, group=spread.device_mesh.get_group(dimension))
    return counts > 0


def gather_full(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all processes, or the tensor itself; it is read-only."""
    if is_dtensor(tensor):
        return tensor.full_tensor()  # type: ignore[no-any-return,attr-defined]  # a DTensor
    return gather_parameter(tensor) if is_partitioned(tensor) else tensor


@torch.no_grad()
def full_state_dict(model: Module, *, keep: bool) -> dict[str, Tensor]:
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
            one = gather_full(value)
            known[id(value)] = one.detach().cpu() if keep else one.new_empty(0)
        if keep:
            state[name] = known[id(value)]
    return state


def local_shard(tensor: Any) -> Tensor:
    """The shard of this process, which shares memory with the tensor, or the tensor itself."""
    if is_partitioned(tensor):
        return tensor.ds_tensor.data  # type: ignore[no-any-return]  # DeepSpeed has no types
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[no-any-return]


def shard_like(values: Tensor, parameter: Any) -> Tensor:
    """Shard ``values``, which every process has whole, like ``parameter``, on its device."""
    if is_partitioned(parameter):
        return partition_of(values, parameter)
    if not is_dtensor(parameter):
        return values.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # see above

    # Every process slices its own shard, without communication.
    return distribute_tensor(
        values.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )


def is_sharded_like(part: Tensor, parameter: Any) -> bool:
    """Return True if ``part`` is sharded like ``parameter``, by :func:`shard_like`."""
    mine = local_shard(parameter) if is_partitioned(parameter) else parameter
    if part.device != mine.device or (is_partitioned(parameter) and part.shape != mine.shape):
        return False
    return is_dtensor(part) == is_dtensor(mine)


def gather_shards(part: Tensor, parameter: Any) -> Tensor:
    """Gather what :func:`shard_like` sharded."""
    if is_partitioned(parameter) and is_sharded_like(part, parameter):
        return all_gather_partitions(part, parameter)
    return gather_full(part)


@torch.no_grad()
def write_sharded(target: Any, values: Tensor) -> None:
    """Write ``values``, which every process has whole, into the sharded ``target``."""
    part = shard_like(values, target)
    if is_partitioned(target):
        update_partition(target, lambda piece: piece.copy_(part))
    else:
        local_shard(target.data).copy_(local_shard(part))


@torch.no_grad()
def zero_sharded(target: Any) -> None:
    """Set a sharded ``target`` to zero."""
    if is_partitioned(target):
        update_partition(target, Tensor.zero_)
    else:
        target.zero_()
