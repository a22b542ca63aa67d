# SPDX-License-Identifier: Apache-2.0
"""Caches of keys and values by the names that the installed transformers has for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from compressed_tensors.modeling import KV_CACHE_ATTR
from compressed_tensors.quantization import is_cached_attention_module
from torch import Tensor
from torch.nn import Module

from llmcompressor.schemes.attention import kv_cache_argument

__all__ = ["as_read", "cache_of", "go_on", "is_passed_over"]


def cache_of(state: Any) -> Any:
    """The cache among a model's outputs."""
    name = next(name for name in ("cache", "past_key_values") if name in state)
    return state[name]


def go_on(model: Any, tokens: Tensor, state: Any) -> Any:
    """The outputs for further tokens."""
    name = kv_cache_argument(model)
    assert name is not None
    return model(tokens, **{name: cache_of(state)}, use_cache=True)


def is_passed_over(attention: Module) -> bool:
    """Whether readers leave states as they are, since compressed-tensors does not know the form."""
    return not is_cached_attention_module(attention)


@contextlib.contextmanager
def as_read(model: Module) -> Iterator[None]:
    """Have a quantized model run as its checkpoint does once transformers has read it."""
    passed_over: list[Any] = [
        module
        for module in model.modules()
        if hasattr(module, KV_CACHE_ATTR) and is_passed_over(module)
    ]
    for module in passed_over:
        module.quantization_enabled = False
    yield
    for module in passed_over:
        del module.quantization_enabled
