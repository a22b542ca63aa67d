# SPDX-License-Identifier: Apache-2.0
"""Picklable and deep-copyable parts of quantized modules.

Those of compressed-tensors are not: its forward is a method that pickle would replace by that of
the class, which does not quantize, and its KV cache holds a weak reference to its attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from compressed_tensors.modeling import IMPL_ATTR, KV_CACHE_ATTR
from compressed_tensors.quantization.lifecycle.forward import set_forward_quantized
from torch.nn import Module

from llmcompressor.quantization.differentiable import (
    DifferentiableAttention,
    DifferentiableCache,
    is_differentiated,
    quantized_forward,
)
from llmcompressor.quantization.empty_cache import answer_as_empty, stands_for

__all__ = ["make_cache_portable", "make_forward_portable"]


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
        if is_differentiated(self.__self__, input):
            return quantized_forward(self.__self__, input)
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


class PortableCache(DifferentiableCache):
    """A quantized cache that is pickled with its attention, and allows a repeated call."""

    def add_past_key_values(self, past_key_values: Any) -> None:
        """Set the cache of a call, unless it is a stand-in for this quantized cache itself."""
        again = past_key_values is self or stands_for(past_key_values, self)
        super().add_past_key_values(None if again else past_key_values)

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
        attention.register_forward_pre_hook(answer_as_empty, with_kwargs=True)
    if hasattr(attention, IMPL_ATTR):
        getattr(attention, IMPL_ATTR).__class__ = DifferentiableAttention
