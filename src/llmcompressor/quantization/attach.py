# SPDX-License-Identifier: Apache-2.0
"""Marking of modules as quantized, in the form that compressed-tensors expects.

Afterwards the module runs with its rounded weight and with fake-quantized activations, as in a
model that transformers has loaded from the checkpoint; and it can be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from compressed_tensors.modeling import (
    IMPL_ATTR,
    KV_CACHE_ATTR,
    QuantizedAttentionImpl,
    QuantizedKVCache,
    initialize_hooked_attention,
)
from compressed_tensors.modeling.attention import HOOKED_ATTENTION_NAME
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from compressed_tensors.utils import get_head_dim, get_num_attn_heads, get_num_kv_heads
from torch import Tensor
from torch.nn import Module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmcompressor.errors import TargetError
from llmcompressor.modeling.names import named_modules
from llmcompressor.quantization.kv_cache import (
    hook_cache,
    initialize_attention,
    make_cache_portable,
    make_forward_portable,
    provide_empty_cache,
    replace_cache_argument,
)
from llmcompressor.quantization.parameters import WeightParameters
from llmcompressor.schemes.attention import is_cached_attention
from llmcompressor.transformers_internals import (
    attention_names,
    attention_of,
    can_set_attention,
    set_attention_name,
)

__all__ = [
    "attach_attention",
    "attach_linear",
    "cache_scheme",
    "cached_attention_modules",
    "check_kv_shape_attributes",
    "check_replaceable_attention",
    "disable_attention_hooks",
    "enable_attention_hooks",
    "quantized_attention_tensors",
    "quantized_linear_tensors",
    "set_parameter",
]

KV_CACHE_TARGETS = ["re:.*(self_attn|attention)$"]
"""What a scheme for the cache alone names as targets; readers take the ``kv_cache_scheme``."""


_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_CACHE_HOOKS = (
    QuantizedKVCache.__module__,
    replace_cache_argument.__module__,
    provide_empty_cache.__module__,
)


def set_parameter(module: Module, name: str, value: Tensor) -> None:
    """Set the parameter ``name`` of ``module``, in the dtype reserved for it."""
    reserved = getattr(module, name, None)
    dtype = value.dtype if reserved is None else reserved.dtype
    shape = value.shape if reserved is None else reserved.shape
    parameter = torch.nn.Parameter(value.detach().to(dtype).reshape(shape), requires_grad=False)
    module.register_parameter(name, parameter)


def attach_linear(
    module: Module,
    scheme: QuantizationScheme,
    weight: WeightParameters | None,
    activations: Mapping[str, Tensor],
    *,
    is_raw: bool = False,
) -> None:
    """Mark a Linear or Embedding as quantized.

    Args:
        module: its weight is already rounded, unless ``is_raw``.
        scheme: how it is quantized.
        weight: the parameters of its weight, or ``None`` if only activations are quantized.
        activations: static parameters by name (``input_scale``, …).
        is_raw: whether the weight is not rounded yet.
    """
    initialize_module_for_quantization(module, scheme, force_zero_point=False)
    make_forward_portable(module)
    if weight is not None:
        set_parameter(module, "weight_scale", weight.scale)
        if not weight.args.symmetric:
            set_parameter(module, "weight_zero_point", weight.zero_point)
        if weight.global_scale is not None:
            set_parameter(module, "weight_global_scale", weight.global_scale)
    for name, value in activations.items():
        set_parameter(module, name, value)
    # A weight that is already dequantized must not be rounded again in every forward.
    module.quantization_status = (
        QuantizationStatus.FROZEN if is_raw else QuantizationStatus.DECOMPRESSED
    )


def cached_attention_modules(model: Module) -> dict[Module, str]:
    """The attention modules with a KV cache, and their names."""
    return {module: name for name, module in named_modules(model) if is_cached_attention(module)}


def check_kv_shape_attributes(model: Any) -> None:
    """Refuse a model whose configuration lacks the shape of its keys and values.

    compressed-tensors reads three attributes. Some configurations use other names for them, have
    none (OPT, BART), or define them per layer and raise an error of their own.

    Raises:
        TargetError: one of them is missing.
    """
    config = model.config.get_text_config(decoder=True)
    try:
        for shape_of in (get_num_attn_heads, get_num_kv_heads, get_head_dim):
            shape_of(config)
    except Exception as error:  # the configuration's own code may raise anything
        raise TargetError(
            f"The keys and values of {type(model).__name__} cannot be quantized: readers take "
            "their shape from num_attention_heads, num_key_value_heads and head_dim, which "
            f"{type(config).__name__} does not tell for the model as a whole.",
            "Leave kv_cache_scheme out, and schemes whose targets are attention modules.",
        ) from error


def check_replaceable_attention(model: Any) -> None:
    """Refuse a model whose attention function loaders cannot replace.

    compressed-tensors sets one attention function for the whole model and calls the previous one by
    its name. Attention that is implemented in the model's own code has a name, but no function.

    Raises:
        TargetError: the function cannot be set, or not be called.
    """
    name, can_be_set = attention_of(model.config), can_set_attention(model)
    if can_be_set and name in ALL_ATTENTION_FUNCTIONS:
        return
    reason = f"runs {name!r}, which is no function" if can_be_set else "lets nobody set it"
    raise TargetError(
        f"The queries of {type(model).__name__} cannot be quantized: readers step into a model's "
        f"attention function, and it {reason}.",
        "Leave attention modules out of the targets and quantize keys and values alone, with "
        "kv_cache_scheme"
        + (", or load it with attn_implementation='sdpa' if it has that." if can_be_set else "."),
    )


def enable_attention_hooks(model: Any, module: Module, *, queries: bool) -> None:
    """Make the states of an attention module accessible to hooks; nothing is quantized yet.

    Raises:
        TargetError: only keys and values are wanted, but queries are rotated: the hook that rotates
            queries also quantizes them, and would look for their scales.
    """
    if not queries and any(name.endswith("_q_attn") for name in module._modules):
        raise TargetError(
            "Keys and values alone cannot be quantized where queries and keys are rotated (R3): "
            "readers would quantize the queries too.",
            "Leave R3 out, or quantize the attention modules instead of kv_cache_scheme.",
        )
    hook_cache(model, module)
    if queries:
        if attention_of(model.config) != HOOKED_ATTENTION_NAME:
            _FUNCTIONS[model] = attention_names(model)
        initialize_hooked_attention(model, module)
    make_cache_portable(module)


def disable_attention_hooks(model: Any, module: Module) -> None:
    """Undo :func:`enable_attention_hooks` after an aborted calibration."""
    for name in (KV_CACHE_ATTR, IMPL_ATTR):
        module._modules.pop(name, None)
    for key, hook in list(module._forward_pre_hooks.items()):
        if getattr(hook, "__module__", None) in _CACHE_HOOKS:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    hooked = attention_of(model.config) == HOOKED_ATTENTION_NAME
    if not hooked or any(hasattr(other, IMPL_ATTR) for other in model.modules()):
        return
    if model not in _FUNCTIONS:  # replaced by the rotation of the queries
        model.set_attn_implementation(QuantizedAttentionImpl._original_impl)
    # One by one: submodels may have other attention functions than the model.
    for config, name in _FUNCTIONS.pop(model, []):
        set_attention_name(config, name)


_FUNCTIONS: WeakKeyDictionary[Module, list[tuple[Any, str]]] = WeakKeyDictionary()
"""Model whose attention function was exchanged → what each of its configurations had before."""


def cache_scheme(args: QuantizationArgs) -> QuantizationScheme:
    """The scheme of an attention module in which only keys and values are quantized."""
    return QuantizationScheme(targets=list(KV_CACHE_TARGETS), input_activations=args)


def quantized_linear_tensors(module: Module, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """The tensors, on the meta device, that a Linear or Embedding will have once it is quantized.

    Args:
        module: the module; not changed.
        scheme: how it will be quantized.
    """
    copy = _meta_copy(module)
    initialize_module_for_quantization(copy, scheme, force_zero_point=False)
    return _meta_parameters(copy)


def quantized_attention_tensors(
    model: Any, module: Module, scheme: QuantizationScheme, *, queries: bool
) -> dict[str, Tensor]:
    """The same as :func:`quantized_linear_tensors` for an attention module."""
    copy = _meta_copy(module)
    enable_attention_hooks(model, copy, queries=queries)
    try:
        _register_state_parameters(copy, scheme)
        return _meta_parameters(copy)
    finally:
        disable_attention_hooks(model, copy)


def _meta_copy(module: Module) -> Module:
    """A shallow copy of a module whose own parameters are on the meta device."""
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__ = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in module.__dict__.items()
        if name not in ("forward", "quantization_scheme", "quantization_status")
    }
    copy.__dict__ |= {
        name: type(value)()
        for name, value in module.__dict__.items()
        if isinstance(value, dict) and "hooks" in name
    }
    for name, parameter in module._parameters.items():
        if parameter is not None:
            empty = torch.empty_like(parameter.detach(), device="meta")
            copy._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
    return copy


def _meta_parameters(module: Module) -> dict[str, Tensor]:
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    return {name: value.detach().to("meta") for name, value in parameters.items()}


def attach_attention(
    module: Module,
    args: QuantizationArgs,
    states: Mapping[str, Tensor],
    scheme: QuantizationScheme | None = None,
) -> None:
    """Mark an attention module's keys and values (and queries) as quantized.

    Args:
        module: prepared by :func:`enable_attention_hooks`.
        args: how its states are quantized.
        states: ``k_scale``, ``v_scale``, ``q_scale`` and zero points.
        scheme: the scheme that targets it; by default one for the KV cache alone.
    """
    if scheme is None:
        scheme = cache_scheme(args)
    _register_state_parameters(module, scheme)
    for name, value in states.items():
        set_parameter(module, name, value)
    module.quantization_status = QuantizationStatus.DECOMPRESSED


def _register_state_parameters(module: Module, scheme: QuantizationScheme) -> None:
    """Register the scales and zero points of an attention module, still without values.

    States are rounded in the dtype of their scales and keep it, so scales have the dtype of the
    Linears that compute the states. compressed-tensors uses the dtype of the module's first
    parameter, but attention sinks may be float32 in a bfloat16 model.
    """
    initialize_attention(module, scheme)
    linears = (one for one in module.modules() if isinstance(one, torch.nn.Linear))
    dtype = next((one.weight.dtype for one in linears), None)
    for name in ("q_scale", "k_scale", "v_scale"):
        present = module._parameters.get(name)
        if present is not None and dtype in _SCALE_DTYPES and present.dtype is not dtype:
            value = present.detach().to(dtype)
            module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
