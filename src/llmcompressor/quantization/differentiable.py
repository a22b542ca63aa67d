# SPDX-License-Identifier: Apache-2.0
"""Differentiable forwards of quantized modules.

compressed-tensors rounds activations without gradients: below such a module only paths through the
residual stream would be trained. Where gradients are recorded, these forwards use straight-through
gradients, as our training does; the values are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.modeling import QuantizedAttentionImpl, QuantizedKVCache
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.utils import patch_attr
from torch import Tensor
from torch.nn import Module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmcompressor.quantization.fake_activations import stored_fake_quantize

__all__ = [
    "DifferentiableAttention",
    "DifferentiableCache",
    "is_differentiated",
    "quantized_forward",
]

_ROWS = 2
"""Dimensions of a matrix."""


def is_differentiated(module: Module, *values: Tensor) -> bool:
    """Return True if gradients have to pass the roundings of ``module``.

    False for a single row, which loaders scale differently, and while tracing.

    Args:
        module: a quantized Linear, Embedding or attention module.
        values: the tensors that it rounds or computes its outputs from.
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


def quantized_forward(module: Any, input: Tensor) -> Tensor:
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


class DifferentiableCache(QuantizedKVCache):  # type: ignore[misc]  # compressed-tensors has no types
    """A quantized KV cache whose keys and values have gradients."""

    past_key_values: Any

    def forward(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantize keys and values, and update the cache of the call, if it has one."""
        attention = self.attn_module()
        if not is_differentiated(attention, key_states, value_states):
            return super().forward(key_states, value_states, *args, **kwargs)
        how: QuantizationArgs = attention.quantization_scheme.input_activations
        states = tuple(
            stored_fake_quantize(attention, base, values, how)
            for base, values in (("k", key_states), ("v", value_states))
        )
        held, self.past_key_values = self.past_key_values, None
        return states if held is None else held().update(*states, *args, **kwargs)


class DifferentiableAttention(QuantizedAttentionImpl):  # type: ignore[misc]  # as above
    """Attention whose rounded queries have gradients."""

    def forward(self, module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantize the queries and call the attention function of the model."""
        if not is_differentiated(module, query):
            return super().forward(module, query, *args, **kwargs)
        query = stored_fake_quantize(
            module, "q", query, module.quantization_scheme.input_activations
        )
        function = ALL_ATTENTION_FUNCTIONS[QuantizedAttentionImpl._original_impl]
        return function(module, query, *args, **kwargs)
