# SPDX-License-Identifier: Apache-2.0
"""Insertion of a quantized KV cache into attention under any name of the cache argument.

compressed-tensors inserts it where it knows the name of the cache argument. That name has changed
in transformers more than once; where the installed compressed-tensors does not know it, the same is
done here with the name in the attention's forward.
"""

from __future__ import annotations

from typing import Any

from compressed_tensors.modeling import KV_CACHE_ATTR, QuantizedKVCache, initialize_hooked_kv_cache
from compressed_tensors.quantization import (
    QuantizationMetadata,
    QuantizationScheme,
    QuantizationStatus,
    is_cached_attention_module,
)
from compressed_tensors.quantization.lifecycle.initialize import (
    initialize_attn_qparams,
    initialize_module_for_quantization,
)
from torch.nn import Module

from llmcompressor.schemes.attention import cache_argument

__all__ = ["give_quantized_cache", "hook_cache", "initialize_attention"]


def hook_cache(model: Any, attention: Module) -> None:
    """Add a quantized cache to an attention module, and pass it to each of its forwards."""
    if is_cached_attention_module(attention):
        initialize_hooked_kv_cache(model, attention)
    elif not hasattr(attention, KV_CACHE_ATTR):
        config = model.config.get_text_config(decoder=True)
        attention.register_module(KV_CACHE_ATTR, QuantizedKVCache(config, attention))
        attention.register_forward_pre_hook(give_quantized_cache, with_kwargs=True)


def give_quantized_cache(
    attention: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: replace the cache of a call by the quantized one.

    The argument keeps the name used in the call: a forward that renames a former name still does
    so.
    """
    name = cache_argument(attention, kwargs)
    if name is None:
        return args, kwargs
    quantized: QuantizedKVCache = getattr(attention, KV_CACHE_ATTR)
    quantized.add_past_key_values(kwargs.get(name))
    return args, {**kwargs, name: quantized}


def initialize_attention(attention: Module, scheme: QuantizationScheme) -> None:
    """Reserve the scales of an attention module whose cache is hooked, and mark it as quantized."""
    if is_cached_attention_module(attention):
        initialize_module_for_quantization(attention, scheme, force_zero_point=False)
        return
    QuantizationMetadata.clear_all_qparams(attention)
    initialize_attn_qparams(attention, scheme, force_zero_point=False)
    attention.quantization_scheme = scheme
    attention.quantization_status = QuantizationStatus.INITIALIZED
