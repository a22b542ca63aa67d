# SPDX-License-Identifier: Apache-2.0
"""Attention modules with a KV cache that can be quantized."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, is_cached_attention_module
from torch.nn import Module

CACHED_ATTENTION = (
    "a class with 'attention' in its name, with k_proj, v_proj, qkv_proj or kv_b_proj, and with a "
    "forward that takes cache or past_key_values and updates it, and not one half of it (as in an "
    "encoder-decoder)"
)
"""What is looked for, for messages."""

_ARGUMENTS = ("cache", "past_key_values", "past_key_value")
"""What transformers has called the cache of keys and values in a forward, the latest first."""

_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")

_HALVES = {"EncoderDecoderCache", "cross_attention_cache", "is_updated", "self_attention_cache"}
"""The cache of an encoder-decoder, and what attention asks of it."""


def state_strategies(args: QuantizationArgs) -> tuple[str, ...]:
    """The strategies that queries, keys and values support, for static or for dynamic ``args``."""
    return ("tensor", "attn_head") if args.dynamic is False else ("tensor", "token")


def has_kv_cache_argument(module: Module) -> bool:
    """Return True if a module has the form of attention with a KV cache argument.

    The test is that of compressed-tensors, with every known name of the argument: the installed
    compressed-tensors may not know the name that transformers, or a model's own code, uses.
    """
    if is_cached_attention_module(module):
        return True
    is_attention = "attention" in type(module).__name__.lower()
    has_states = any(hasattr(module, name) for name in _PROJECTIONS)
    return is_attention and has_states and kv_cache_argument(module) is not None


def kv_cache_argument(module: Module, given: Mapping[str, Any] | None = None) -> str | None:
    """The name of the argument through which a module gets its KV cache.

    Args:
        module: a module with a forward.
        given: keyword arguments of a call. One of them may be the cache under a former name, which
            the forward then handles itself.
    """
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # the forward has no signature
        return None
    taken = next((name for name in _ARGUMENTS if name in parameters), None)
    return next((name for name in (taken, *_ARGUMENTS) if name in (given or ())), taken)


def updates_kv_cache(module: Module) -> bool:
    """Return True if a method of the module's class calls an ``update``, or its code is hidden."""
    kind: Any = type(module)
    if not has_kv_cache_argument(module) or _layer_type(module) == "linear_attention":
        return False
    return not hasattr(inspect.unwrap(kind.forward), "__code__") or "update" in _referenced_names(
        kind
    )


def is_cached_attention(module: Module) -> bool:
    """Return True if a module is attention that stores keys and values in a KV cache.

    Attention is recognized by names and arguments. Linear attention may look the same, but it keeps
    one state, which it reads from a cache class of its own. Attention that accesses one part of a
    cache (self- or cross-attention) does not find it in the quantized cache that loaders insert.
    """
    kind: Any = type(module)  # hashable, whatever it is a class of
    return updates_kv_cache(module) and not _referenced_names(kind) & _HALVES


def kv_source_layer(module: Module) -> int | None:
    """The layer whose keys and values this attention reads, if it computes none of its own.

    Taken from the attributes of transformers' attention, or else from the configuration: the last
    layer of the same type before the final layers that share a cache.
    """
    if not getattr(module, "is_kv_shared_layer", False) or has_kv_cache_argument(module):
        return None
    told = getattr(module, "kv_shared_layer_index", None)
    if isinstance(told, int):
        return told
    config, own = getattr(module, "config", None), _layer_type(module)
    layers = getattr(config, "num_hidden_layers", 0) - getattr(config, "num_kv_shared_layers", 0)
    types = list(getattr(config, "layer_types", None) or ())[: max(layers, 0)]
    return max((index for index, one in enumerate(types) if one == own), default=None)


def _layer_type(module: Module) -> str | None:
    """The layer type of a module according to its configuration, or ``None``."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if types and isinstance(index, int) and 0 <= index < len(types):
        return str(types[index])
    return None


@cache
def _referenced_names(kind: Any) -> frozenset[str]:
    """The names that the methods of a class refer to."""
    own = kind.__mro__[: kind.__mro__.index(Module)]
    methods = (inspect.unwrap(each) for one in own for each in vars(one).values() if callable(each))
    codes = (getattr(method, "__code__", None) for method in methods)
    return frozenset(name for code in codes if code is not None for name in _names_in_code(code))


def _names_in_code(code: CodeType) -> Iterator[str]:
    """The names that a function and its nested functions refer to."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)
