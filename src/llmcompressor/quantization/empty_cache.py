# SPDX-License-Identifier: Apache-2.0
"""An empty cache for attention with a quantized KV cache in a model that runs without a cache.

Attention may do more with its cache than update it: ask for its length, or for a state of another
kind. The cache object that compressed-tensors inserts forwards such calls to the model's cache;
without one, as in calibration, they fail.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from compressed_tensors.modeling import KV_CACHE_ATTR, QuantizedKVCache
from torch import Tensor
from torch.nn import Module
from transformers import Cache, DynamicCache

__all__ = ["EmptyCache", "answer_as_empty", "left_without_cache", "stands_for"]


class EmptyCache:
    """The cache of one call of attention: it quantizes, and behaves like an empty cache otherwise.

    It belongs to the call and not to the module: several forwards may be interleaved.

    Args:
        quantized: the quantized cache of the attention module.
    """

    def __init__(self, quantized: QuantizedKVCache) -> None:
        self._quantized = quantized
        self._is_updated = False
        self._cache: Cache | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantize keys and values; store them if the empty cache was accessed before."""
        states = self._quantized(key_states, value_states, *args, **kwargs)
        self._is_updated = True
        return states if self._cache is None else self._cache.update(*states, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or (self._is_updated and self._cache is None):
            raise AttributeError(f"The cache of this call has no {name!r}.")
        if self._cache is None:
            self._cache = DynamicCache(config=self._quantized.config)
        return getattr(self._cache, name)


def stands_for(cache: Any, quantized: QuantizedKVCache) -> bool:
    """Return True if the cache of a call is an :class:`EmptyCache` made for ``quantized``."""
    return isinstance(cache, EmptyCache) and cache._quantized is quantized


def answer_as_empty(
    attention: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: give an attention module without a cache an empty one for this call."""
    quantized = getattr(attention, KV_CACHE_ATTR)
    if quantized.past_key_values is None:
        empty = EmptyCache(quantized)
        kwargs = {key: empty if one is quantized else one for key, one in kwargs.items()}
    return args, kwargs


@contextmanager
def left_without_cache(attentions: Iterable[Module]) -> Iterator[None]:
    """Context manager: attention without a cache gets no empty one, as under loaders."""
    taken: list[tuple[Module, Any]] = []
    for module in attentions:
        hooks = module._forward_pre_hooks
        taken.append((module, hooks))
        kept = ((key, hook) for key, hook in hooks.items() if hook is not answer_as_empty)
        module._forward_pre_hooks = OrderedDict(kept)
    try:
        yield
    finally:
        for module, hooks in taken:
            module._forward_pre_hooks = hooks
