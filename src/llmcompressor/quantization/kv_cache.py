# SPDX-License-Identifier: Apache-2.0
"""Insertion of a quantized KV cache into attention under any name of the cache argument.

compressed-tensors inserts it where it knows the name of the cache argument. That name has changed
in transformers more than once; where the installed compressed-tensors does not know it, the same is
done here with the name in the attention's forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from compressed_tensors.modeling import (
    IMPL_ATTR,
    KV_CACHE_ATTR,
    QuantizedAttentionImpl,
    QuantizedKVCache,
    initialize_hooked_kv_cache,
)
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationMetadata,
    QuantizationScheme,
    QuantizationStatus,
    is_cached_attention_module,
)
from compressed_tensors.quantization.lifecycle.forward import (
    forward_quantize,
    set_forward_quantized,
)
from compressed_tensors.quantization.lifecycle.initialize import (
    initialize_attn_qparams,
    initialize_module_for_quantization,
)
from compressed_tensors.utils import patch_attr
from torch import Tensor
from torch.nn import Module
from transformers import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmcompressor.quantization.fake_quantize import stored_fake_quantize
from llmcompressor.schemes.attention import kv_cache_argument


def hook_cache(model: Any, attention: Module) -> None:
    """Add a quantized cache to an attention module, and pass it to each of its forwards."""
    if is_cached_attention_module(attention):
        initialize_hooked_kv_cache(model, attention)
    elif not hasattr(attention, KV_CACHE_ATTR):
        config = model.config.get_text_config(decoder=True)
        attention.register_module(KV_CACHE_ATTR, QuantizedKVCache(config, attention))
        attention.register_forward_pre_hook(replace_cache_argument, with_kwargs=True)


def replace_cache_argument(
    attention: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: replace the cache of a call by the quantized one.

    The argument keeps the name used in the call: a forward that renames a former name still does
    so.
    """
    name = kv_cache_argument(attention, kwargs)
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


# --------------------
# An empty cache for attention with a quantized KV cache in a model that runs without a cache.
#
# Attention may do more with its cache than update it: ask for its length, or for a state of
# another kind. The cache object that compressed-tensors inserts forwards such calls to the model's
# cache; without one, as in calibration, they fail.


class EmptyCache:
    """The cache of one call of attention: it quantizes, and behaves like an empty cache otherwise.

    It belongs to the call and not to the module: several forwards may be interleaved.
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


def provide_empty_cache(
    attention: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: give an attention module without a cache an empty one for this call."""
    quantized = getattr(attention, KV_CACHE_ATTR)
    if quantized.past_key_values is None:
        empty = EmptyCache(quantized)
        kwargs = {key: empty if one is quantized else one for key, one in kwargs.items()}
    return args, kwargs


@contextmanager
def without_empty_caches(attentions: Iterable[Module]) -> Iterator[None]:
    """Context manager: attention without a cache gets no empty one, as under loaders."""
    taken = {module: module._forward_pre_hooks for module in attentions}
    for module, hooks in taken.items():
        kept = ((key, hook) for key, hook in hooks.items() if hook is not provide_empty_cache)
        module._forward_pre_hooks = OrderedDict(kept)
    try:
        yield
    finally:
        for module, hooks in taken.items():
            module._forward_pre_hooks = hooks


# --------------------
# Differentiable forwards of quantized modules.
#
# compressed-tensors rounds activations without gradients: below such a module only paths through
# the residual stream would be trained. Where gradients are recorded, these forwards use straight-
# through gradients, as our training does; the values are the same.

_ROWS = 2
"""Dimensions of a matrix."""


def needs_gradients(module: Module, *values: Tensor) -> bool:
    """Return True if gradients have to pass the roundings of a quantized module.

    False for a single row, which loaders scale differently, and while tracing. ``values`` are the
    tensors that it rounds or computes its outputs from.
    """
    is_tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    if is_tracing or not torch.is_grad_enabled():
        return False
    is_enabled = getattr(module, "quantization_enabled", True)
    if not is_enabled or getattr(module, "quantization_status", None) is None:
        return False
    if any(one.ndim < _ROWS for one in values):
        return False
    scheme: Any = getattr(module, "quantization_scheme", None)
    if scheme is None:
        return False
    passes = any(one.requires_grad for one in values) and scheme.input_activations is not None
    return passes or scheme.output_activations is not None


def differentiable_forward(module: Any, input: Tensor) -> Tensor:
    """The output of a quantized Linear or Embedding, with straight-through gradients."""
    scheme, weight, x = module.quantization_scheme, module.weight, input
    values = weight.data
    if scheme.input_activations:
        x = stored_fake_quantize(module, "input", x, scheme.input_activations)
    if scheme.weights and module.quantization_status < QuantizationStatus.COMPRESSED:
        values = forward_quantize(module, values, "weight", scheme.weights)
    with patch_attr(weight, "data", values):
        out: Tensor = type(module).forward(module, x)
    if scheme.output_activations:
        out = stored_fake_quantize(module, "output", out, scheme.output_activations)
    return out


class DifferentiableAttention(QuantizedAttentionImpl):  # type: ignore[misc]  # as above
    """Attention whose rounded queries have gradients."""

    def forward(self, module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantize the queries and call the attention function of the model."""
        if not needs_gradients(module, query):
            return super().forward(module, query, *args, **kwargs)
        query = stored_fake_quantize(
            module, "q", query, module.quantization_scheme.input_activations
        )
        function = ALL_ATTENTION_FUNCTIONS[QuantizedAttentionImpl._original_impl]
        return function(module, query, *args, **kwargs)


# --------------------
# Picklable and deep-copyable parts of quantized modules.
#
# Those of compressed-tensors are not: its forward is a method that pickle would replace by that of
# the class, which does not quantize, and its KV cache holds a weak reference to its attention.


class QuantizedForward:
    """The forward of a quantized Linear or Embedding: a method that is rebuilt when unpickled.

    Args:
        module: a module with a quantized forward of compressed-tensors.
    """

    def __init__(self, module: Any) -> None:
        self.__self__ = module
        self._function: Callable[..., Any] | None = module.forward.__func__

    def __call__(self, input: Any) -> Any:
        """Run the module."""
        if needs_gradients(self.__self__, input):
            return differentiable_forward(self.__self__, input)
        return self.__func__(self.__self__, input)

    @property
    def __func__(self) -> Callable[..., Any]:
        if self._function is None:
            module = self.__self__
            own = module.__dict__.pop("forward", None)
            set_forward_quantized(module)
            self._function = module.__dict__.pop("forward").__func__
            if own is not None:
                module.forward = own
        return self._function

    @property
    def __wrapped__(self) -> Any:
        """The unquantized forward as a function; compressed-tensors reads this attribute."""
        return type(self.__self__).forward

    def __getstate__(self) -> dict[str, Any]:
        return {"__self__": self.__self__, "_function": None}


class PortableCache(QuantizedKVCache):  # type: ignore[misc]  # compressed-tensors has no types
    """A quantized cache that passes gradients, is pickled with its attention, and called again."""

    past_key_values: Any

    def forward(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantize keys and values, and update the cache of the call, if it has one."""
        attention = self.attn_module()
        if not needs_gradients(attention, key_states, value_states):
            return super().forward(key_states, value_states, *args, **kwargs)
        how: QuantizationArgs = attention.quantization_scheme.input_activations
        states = tuple(
            stored_fake_quantize(attention, base, values, how)
            for base, values in (("k", key_states), ("v", value_states))
        )
        held, self.past_key_values = self.past_key_values, None
        return states if held is None else held().update(*states, *args, **kwargs)

    def add_past_key_values(self, past_key_values: Any) -> None:
        """Set the cache of a call, unless it is a stand-in for this quantized cache itself."""
        is_empty = isinstance(past_key_values, EmptyCache) and past_key_values._quantized is self
        super().add_past_key_values(
            None if is_empty or past_key_values is self else past_key_values
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "attn_module": self.attn_module(), "past_key_values": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "attn_module": ref(state["attn_module"])})


def make_forward_portable(module: Module) -> None:
    """Make a quantized module of compressed-tensors picklable."""
    module.forward = QuantizedForward(module)


def make_cache_portable(attention: Module) -> None:
    """Make attention with a quantized KV cache picklable, and able to run without a cache."""
    cache = getattr(attention, KV_CACHE_ATTR)
    if not isinstance(cache, PortableCache):
        cache.__class__ = PortableCache
        attention.register_forward_pre_hook(provide_empty_cache, with_kwargs=True)
    if hasattr(attention, IMPL_ATTR):
        getattr(attention, IMPL_ATTR).__class__ = DifferentiableAttention
