# SPDX-License-Identifier: Apache-2.0
"""Removal of accelerate's dispatch hooks from a model offloaded to memory or disk.

The hooks load a weight for one forward pass and unload it again. Between forward passes the weight
is on the meta device and can be neither read nor written, and a run needs the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, remove_hook_from_module
from accelerate.utils.modeling import named_module_tensors, set_module_tensor_to_device
from accelerate.utils.offload import OffloadedWeightsLoader, PrefixedDataset
from torch import Tensor
from torch.nn import Module

from llmcompressor.errors import ArgumentError
from llmcompressor.host_memory import free_host_memory
from llmcompressor.units import in_bytes

__all__ = ["is_dispatched", "is_offloaded", "take_back"]


def is_dispatched(model: Module) -> bool:
    """Return True if accelerate's hooks move the model's inputs or its weights."""
    return any(True for one in model.modules() for _ in _aligning(one))


def is_offloaded(model: Module) -> bool:
    """Return True if accelerate's hooks offload weights, and do not merely move inputs."""
    return any(hook.offload for one in model.modules() for hook in _aligning(one))


def take_back(model: Module) -> None:
    """Load all offloaded weights into memory and remove accelerate's hooks.

    Weights on an accelerator stay there; offloaded ones are loaded into main memory.

    Raises:
        ArgumentError: main memory has no room for those on the disk.
    """
    away = [(one, hook) for one in model.modules() for hook in _aligning(one) if hook.offload]
    _check_room(away)
    for module, hook in away:
        for name, _ in _held(module, hook):
            value = hook.weights_map[name]
            kept = value if _waits_in_memory(hook.weights_map, name) else value.clone()  # a file's
            set_module_tensor_to_device(module, name, "cpu", value=kept)
        hook.offload = False  # else its removal would put the weights back where they were
    remove_hook_from_module(model, recurse=True)
    vars(model).pop("hf_device_map", None)  # transformers and its trainer rely on it
    tie = getattr(model, "tie_weights", None)
    if away and callable(tie):
        tie()  # modules that shared a weight each have a copy now


def _aligning(module: Module) -> Iterator[AlignDevicesHook]:
    waiting: list[ModelHook | None] = [getattr(module, "_hf_hook", None)]
    while waiting:
        hook = waiting.pop()
        if isinstance(hook, SequentialHook):
            waiting.extend(hook.hooks)
        elif isinstance(hook, AlignDevicesHook):
            yield hook


def _held(module: Module, hook: AlignDevicesHook) -> list[tuple[str, Tensor]]:
    """Return the tensors that the hook loads into the module."""
    return list(
        named_module_tensors(
            module,
            include_buffers=hook.offload_buffers,
            recurse=hook.place_submodules,
            remove_non_persistent=True,
        )
    )


def _check_room(away: list[tuple[Module, AlignDevicesHook]]) -> None:
    on_disk = [
        tensor.nbytes
        for module, hook in away
        for name, tensor in _held(module, hook)
        if not _waits_in_memory(hook.weights_map, name)
    ]
    size, free = sum(on_disk), free_host_memory()
    if size > free:
        raise ArgumentError(
            f"accelerate keeps {len(on_disk)} weights of the model on the disk ({in_bytes(size)}), "
            f"and main memory has {in_bytes(free)} left for them.",
            "Give the folder of the model instead: it is read block by block.",
        )


def _waits_in_memory(held: Any, name: str) -> bool:
    """Return True if an offloaded weight is held in memory and not on the disk."""
    while isinstance(held, PrefixedDataset):
        held, name = held.dataset, f"{held.prefix}{name}"
    return not isinstance(held, OffloadedWeightsLoader) or name in held.state_dict
