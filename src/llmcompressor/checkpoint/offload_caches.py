# SPDX-License-Identifier: Apache-2.0
"""Removal of compressed-tensors' offload caches, which keep weights in memory or on disk.

A module's tensors are loaded for each use of them. Writes to a loaded copy are lost, unless it is
the stored tensor itself. A run needs the weights themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from compressed_tensors.offload import remove_dispatch
from compressed_tensors.offload.cache.base import OffloadCache
from torch import Tensor
from torch.distributed import get_world_size, is_initialized
from torch.nn import Module, Parameter

from llmcompressor.errors import ArgumentError
from llmcompressor.host_memory import free_host_memory
from llmcompressor.logger import logger
from llmcompressor.units import in_bytes
from llmcompressor.wording import listed

__all__ = ["copy_without_weights", "is_cached", "take_out"]


def is_cached(model: Module) -> bool:
    """Return True if compressed-tensors offloads any tensor of the model."""
    return any(True for _ in _caches(model))


def take_out(model: Module) -> None:
    """Load all offloaded weights into memory and remove the caches.

    Weights on an accelerator stay there; others are loaded into main memory.

    Raises:
        ArgumentError: main memory has no room for the weights to load.
    """
    caches = list(_caches(model))
    _check_room(model)
    copied: dict[int, Tensor] = {}
    for cache in caches:
        is_on_disk = cache.offload_device == "disk"
        cache.onload_device = "cpu" if is_on_disk else cache.offload_device
    away = [
        (module, name)
        for module in model.modules()
        for cache in _caches_of(module)
        for name, _ in _taking_room(cache)
    ]
    remove_dispatch(model, onload_tensors=True)
    for module, name in away:
        one = getattr(module, name)
        if id(one) not in copied:  # it is a mapped file, or shared memory
            copied[id(one)] = one
            one.data = one.data.clone()
    vars(model).pop("hf_device_map", None)  # transformers and its trainer rely on it
    tie = getattr(model, "tie_weights", None)
    if away and callable(tie):
        tie()  # modules that shared a weight each have a copy now
    logger.info(
        "compressed-tensors kept the weights apart from the model: they are brought into memory, "
        "and the model is offloaded no longer."
    )


def copy_without_weights(model: Module) -> Module:
    """Return a copy of a model with parameters on the meta device and no offload caches."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        waiting = [cache.offloaded_values for cache in _caches_of(module)]
        for one in (waiting[0] if waiting else module._parameters).values():
            if one is not None:
                empty = torch.empty_like(one.detach(), device="meta")
                memo[id(one)] = Parameter(empty, requires_grad=one.requires_grad)
        for name, one in (waiting[1] if waiting else {}).items():
            if one is not None:
                memo[id(one)] = module._buffers[name].to("cpu", copy=True)  # type: ignore[union-attr]
    copied = copy.deepcopy(model, memo)
    remove_dispatch(copied)
    return copied


def _caches_of(module: Module) -> list[OffloadCache]:
    """Return the offload caches of a module's parameters and buffers."""
    every: tuple[Any, ...] = (module._parameters, module._buffers)
    return [one for one in every if isinstance(one, OffloadCache)]


def _caches(model: Module) -> Iterator[OffloadCache]:
    return (cache for module in model.modules() for cache in _caches_of(module))


def _taking_room(cache: OffloadCache) -> list[tuple[str, Tensor]]:
    """Return the tensors to copy: those on the disk or in memory shared between processes."""
    return [
        (str(name), one)
        for name, one in cache.offloaded_values.items()
        if one is not None and (one.is_meta or (one.device.type == "cpu" and one.is_shared()))
    ]


def _check_room(model: Module) -> None:
    away = {
        name: sum(one.nbytes for cache in _caches_of(module) for _, one in _taking_room(cache))
        for name, module in model.named_modules()
    }
    held = [name or type(model).__name__ for name, size in away.items() if size]
    size, free = sum(away.values()), free_host_memory()
    if is_initialized():
        free //= get_world_size()  # each process gets its own
    if size > free:
        raise ArgumentError(
            f"compressed-tensors keeps the weights of {listed(held)} on the disk or in shared "
            f"memory ({in_bytes(size)}), and main memory has {in_bytes(free)} left for them.",
            "Give the folder of the model instead: it is read block by block.",
        )
