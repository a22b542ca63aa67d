# SPDX-License-Identifier: Apache-2.0
"""What attention with a quantized cache is given where the model keeps no cache.

Attention may ask its cache for more than to be updated: how much it holds, or for a state of
another kind. What compressed-tensors puts in its place passes that on to the cache of the model;
without one, as in calibration, it knows no answer.
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
    """The cache of one call of attention: it quantizes, and answers as an empty one would.

    It belongs to the call and not to the module: several forwards may be under way in turn.

    Args:
        quantized: what stands in the attention module.
    """

    def __init__(self, quantized: QuantizedKVCache) -> None:
        self._quantized = quantized
        self._is_updated = False
        self._cache: Cache | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantize keys and values; one that was asked before may be asked of them afterwards."""
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
    """Whether what a call has as its cache was given to it in the place of ``quantized``."""
    return isinstance(cache, EmptyCache) and cache._quantized is quantized


def answer_as_empty(
    attention: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give an attention module that gets no cache an empty one for this call; a hook."""
    quantized = getattr(attention, KV_CACHE_ATTR)
    if quantized.past_key_values is None:
        empty = EmptyCache(quantized)
        kwargs = {key: empty if one is quantized else one for key, one in kwargs.items()}
    return args, kwargs


@contextmanager
def left_without_cache(attentions: Iterable[Module]) -> Iterator[None]:
    """While the body runs, attention that gets no cache gets none from here, as under readers."""
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
