# SPDX-License-Identifier: Apache-2.0
"""Device placement of a model: one accelerator if it fits, several if not, else the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import (
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
)
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import convert_file_size_to_int
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmcompressor.device_memory import free_device_memory, give_back_device_memory
from llmcompressor.logger import logger

__all__ = [
    "best_device",
    "calculate_offload_device_map",
    "custom_offload_device_map",
    "dispatch_for_generation",
]

# Generation needs more than the weights: the cache, the activations and the allocator's slack.
_SHARE_FOR_WEIGHTS = 0.8


def best_device() -> torch.device:
    """Return the accelerator with the most free memory, or the CPU.

    The free memory is queried only if there are several accelerators.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None  # there is one: it is available
    count = torch.accelerator.device_count()
    if count == 1:
        return torch.device(kind.type, 0)
    return torch.device(kind.type, max(range(count), key=free_device_memory))


def dispatch_for_generation(
    model: PreTrainedModel, *, no_split_modules: list[str] | None = None
) -> PreTrainedModel:
    """Prepare a model for generation: on the best device, in evaluation mode.

    A model that fits one accelerator is moved there whole. A larger one is dispatched over all of
    them, and to main memory for the rest. Without an accelerator it is not moved.

    Args:
        model: the model; it is moved in place.
        no_split_modules: classes of modules that must stay on one device; the model's own list
            by default.

    Returns:
        The same model.
    """
    nn.Module.eval(model)
    target = best_device()
    if target.type == "cpu":
        return model
    remove_hook_from_submodules(model)
    give_back_device_memory()
    free = {index: free_device_memory(index) for index in range(torch.accelerator.device_count())}
    if target.type == "mps" or _bytes_of(model) <= _SHARE_FOR_WEIGHTS * free[target.index]:
        nn.Module.to(model, target)
        return model
    keep_whole = no_split_modules or sorted(model._no_split_modules or ())
    memory: dict[int | str, int | str] = {
        index: int(_SHARE_FOR_WEIGHTS * free_bytes) for index, free_bytes in free.items()
    }
    memory["cpu"] = _bytes_of(model)
    device_map = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=keep_whole)
    logger.info(
        "The model does not fit {}: it is spread over {}.", target, set(device_map.values())
    )
    dispatch_model(model, device_map=device_map)
    return model


def calculate_offload_device_map(
    model_stub: str,
    reserve_for_hessians: bool = False,
    num_gpus: int = 1,
    torch_dtype: torch.dtype = torch.float16,
    model_cls: Any = AutoModelForCausalLM,
    **model_kwargs: Any,
) -> dict[str, int | str]:
    """Return a ``device_map`` for ``from_pretrained`` that leaves room for calibration.

    Calibration here needs no such map, since blocks are moved to the accelerator one at a time; it
    is kept for existing scripts.

    Args:
        model_stub: name or folder of the model.
        reserve_for_hessians: leave room for one Gram matrix (float32, inputs by inputs) for each
            Linear of one block, as GPTQ keeps them.
        num_gpus: the number of accelerators to use.
        torch_dtype: the dtype in which the weights will be loaded.
        model_cls: the class that will load them.
        **model_kwargs: arguments for loading the configuration.

    Returns:
        Name of a module → index of an accelerator, or ``"cpu"``.
    """
    available = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not available:
        return {"": "cpu"}
    model = _hollow(model_stub, torch_dtype, model_cls, model_kwargs)
    reserved = _gram_bytes(model) if reserve_for_hessians else 0
    memory = {
        index: max(0, int(_SHARE_FOR_WEIGHTS * free_device_memory(index)) - reserved)
        for index in range(min(num_gpus, available))
    }
    return _spread(model, memory)


def custom_offload_device_map(
    model_stub: str,
    max_memory_per_gpu: str | int,
    num_gpus: int = 1,
    model_cls: Any = AutoModelForCausalLM,
    **model_kwargs: Any,
) -> dict[str, int | str]:
    """Return a ``device_map`` for ``from_pretrained`` with a memory limit per accelerator.

    Args:
        model_stub: name or folder of the model.
        max_memory_per_gpu: bytes, or a text such as ``"10GB"``.
        num_gpus: the number of accelerators to use.
        model_cls: the class that will load the weights.
        **model_kwargs: arguments for loading the configuration; ``dtype``, or ``torch_dtype``,
            is the dtype in which the weights will be loaded, by default the checkpoint's.

    Returns:
        Name of a module → index of an accelerator, or ``"cpu"`` for the rest.
    """
    limit = convert_file_size_to_int(max_memory_per_gpu)
    available = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not available:
        return {"": "cpu"}
    dtype = model_kwargs.pop("torch_dtype", "auto")
    dtype = model_kwargs.pop("dtype", dtype)
    model = _hollow(model_stub, dtype, model_cls, model_kwargs)
    return _spread(model, dict.fromkeys(range(min(num_gpus, available)), limit))


def _hollow(stub: str, dtype: Any, model_cls: Any, given: dict[str, Any]) -> PreTrainedModel:
    """Return a model on the meta device; a dtype of ``"auto"`` is that of its configuration."""
    config = AutoConfig.from_pretrained(stub, **given)
    make = getattr(model_cls, "from_config", None) or model_cls._from_config
    trust = {key: given[key] for key in ("trust_remote_code",) if key in given}
    with init_empty_weights():
        model: PreTrainedModel = make(
            config, dtype=config.dtype if dtype in ("auto", None) else dtype, **trust
        )
    return model


def _spread(model: PreTrainedModel, memory: Mapping[int, int]) -> dict[str, int | str]:
    limits: dict[int | str, int | str] = dict(memory.items())
    limits["cpu"] = _bytes_of(model)
    whole = sorted(model._no_split_modules or ())
    return dict(infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole))


def _bytes_of(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in tensors.values())


def _gram_bytes(model: nn.Module) -> int:
    """Return the bytes of one block's Gram matrices; blocks are assumed to be alike."""
    by_block: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            block = ".".join(name.split(".")[:3])
            by_block[block] = by_block.get(block, 0) + 4 * module.in_features**2
    return max(by_block.values(), default=0)
