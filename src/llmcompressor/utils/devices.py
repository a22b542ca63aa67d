# SPDX-License-Identifier: Apache-2.0
"""Device placement of a model: one accelerator if it fits, several if not, else the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import without_cache as disable_cache
from llmcompressor.modeling.patches import eval_mode as eval_context
from llmcompressor.modeling.patches import quantization_disabled as DisableQuantization  # noqa: N812  # its name in scripts
from llmcompressor.modeling.weights import embeddings as get_embeddings
from llmcompressor.modeling.weights import untie_embeddings
from llmcompressor.runtime.memory import empty_device_cache, free_device_memory
from llmcompressor.transformers_internals import build_from_config, whole_classes

__all__ = [
    "DisableQuantization",
    "best_device",
    "calculate_offload_device_map",
    "calibration_forward_context",
    "custom_offload_device_map",
    "disable_cache",
    "dispatch_for_generation",
    "eval_context",
    "get_embeddings",
    "get_no_split_params",
    "targets_embeddings",
    "untie_word_embeddings",
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
    empty_device_cache()
    free = {index: free_device_memory(index) for index in range(torch.accelerator.device_count())}
    if target.type == "mps" or _model_bytes(model) <= _SHARE_FOR_WEIGHTS * free[target.index]:
        nn.Module.to(model, target)
        return model
    keep_whole = no_split_modules or whole_classes(model)
    memory: dict[int | str, int | str] = {
        index: int(_SHARE_FOR_WEIGHTS * free_bytes) for index, free_bytes in free.items()
    }
    memory["cpu"] = _model_bytes(model)
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
    model = _meta_model(model_stub, torch_dtype, model_cls, model_kwargs)
    reserved = _gram_bytes(model) if reserve_for_hessians else 0
    memory = {
        index: max(0, int(_SHARE_FOR_WEIGHTS * free_device_memory(index)) - reserved)
        for index in range(min(num_gpus, available))
    }
    return _infer_device_map(model, memory)


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
    model = _meta_model(model_stub, dtype, model_cls, model_kwargs)
    return _infer_device_map(model, dict.fromkeys(range(min(num_gpus, available)), limit))


def _meta_model(stub: str, dtype: Any, model_cls: Any, given: dict[str, Any]) -> PreTrainedModel:
    """Return a model on the meta device; a dtype of ``"auto"`` is that of its configuration."""
    config = AutoConfig.from_pretrained(stub, **given)
    trust = {key: given[key] for key in ("trust_remote_code",) if key in given}
    with init_empty_weights():
        model: PreTrainedModel = build_from_config(
            model_cls, config, dtype=config.dtype if dtype in ("auto", None) else dtype, **trust
        )
    return model


def _infer_device_map(model: PreTrainedModel, memory: Mapping[int, int]) -> dict[str, int | str]:
    limits: dict[int | str, int | str] = dict(memory.items())
    limits["cpu"] = _model_bytes(model)
    whole = whole_classes(model)
    return dict(infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole))


def _model_bytes(model: nn.Module) -> int:
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


# --------------------
# Contexts for forward passes in user scripts, and a model's embeddings.


@contextmanager
def calibration_forward_context(model: Module) -> Iterator[None]:
    """Run a model for calibration inside: no gradients, evaluation mode, no cache.

    Attention and the output head run as the model is configured.
    """
    with torch.no_grad(), disable_cache(model), eval_context(model):
        yield


def untie_word_embeddings(model: PreTrainedModel) -> None:
    """Untie the input and output embeddings, in the model and in its configuration.

    A model without accessible embeddings is left unchanged, with a warning.
    """
    if None in get_embeddings(model):
        logger.warning(
            "{} does not tell its input and output embeddings: they cannot be untied.",
            type(model).__name__,
        )
        return
    untie_embeddings(model)


def targets_embeddings(
    model: PreTrainedModel,
    targets: Iterable[tuple[str, Module]],
    check_input: bool = True,
    check_output: bool = True,
) -> bool:
    """Return True if any of the modules is an embedding of the model.

    Args:
        model: the model.
        targets: modules, with their names.
        check_input: look for the input embeddings.
        check_output: look for the output embeddings.
    """
    inputs, outputs = get_embeddings(model)
    sought = [inputs] * check_input + [outputs] * check_output
    found = {module for _, module in targets}
    return any(one in found for one in sought if one is not None)


def get_no_split_params(model: Module) -> str | list[str]:
    """The classes of modules that are to stay on one device: decoder layers.

    Returns:
        Their names; ``"__ALL__"`` for a model that names none.
    """
    return whole_classes(model) or "__ALL__"
