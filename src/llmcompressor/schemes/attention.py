# SPDX-License-Identifier: Apache-2.0
"""Which modules are attention with a cache of keys and values, and can have it quantized."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

from compressed_tensors.quantization import is_cached_attention_module
from torch.nn import Module

__all__ = ["CACHED_ATTENTION", "is_cached_attention"]

CACHED_ATTENTION = (
    "a class with 'attention' in its name, with k_proj, v_proj, qkv_proj or kv_b_proj, and with a "
    "forward that takes past_key_values and updates them, and not one half of them (as in an "
    "encoder-decoder)"
)
"""What is looked for, for messages."""

_HALVES = {"EncoderDecoderCache", "cross_attention_cache", "is_updated", "self_attention_cache"}
"""The cache of an encoder-decoder, and what attention asks of it."""


def is_cached_attention(module: Module) -> bool:
    """Whether a module is attention that keeps keys and values.

    compressed-tensors goes by names and arguments. Those of linear attention may be the same, but
    what it keeps is one state, which it asks of a cache of its own kind. Attention that looks for
    a half of a cache, its own or the encoder's, does not find it in what readers put in its place.
    """
    kind: Any = type(module)  # hashable, whatever it is a class of
    return (
        is_cached_attention_module(module)
        and _layer_type(module) != "linear_attention"
        and _updates_cache(kind)
    )


def _layer_type(module: Module) -> str | None:
    """What the configuration says of a module's layer, if it says anything."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if types and isinstance(index, int) and 0 <= index < len(types):
        return str(types[index])
    return None


@cache
def _updates_cache(kind: Any) -> bool:
    """Whether some method of a class calls an ``update``, as of a whole cache; yes if hidden."""
    forward = inspect.unwrap(kind.forward)
    if not hasattr(forward, "__code__"):
        return True
    own = kind.__mro__[: kind.__mro__.index(Module)]
    methods = (inspect.unwrap(each) for one in own for each in vars(one).values() if callable(each))
    codes = (getattr(method, "__code__", None) for method in methods)
    names = {name for code in codes if code is not None for name in _names(code)}
    return "update" in names and not names & _HALVES


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function uses, also in functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
