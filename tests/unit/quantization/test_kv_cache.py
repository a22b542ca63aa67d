# SPDX-License-Identifier: Apache-2.0
"""Attention gets its quantized cache by the name that its own forward has for it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from compressed_tensors.modeling import IMPL_ATTR, KV_CACHE_ATTR
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from tests.support import tiny_llama as tiny
from tests.support.caches import cache_of
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

from llmcompressor.quantization.attach import (
    attach_attention,
    cache_scheme,
    disable_attention_hooks,
    enable_attention_hooks,
    quantized_attention_tensors,
)
from llmcompressor.schemes.attention import is_cached_attention, kv_cache_argument

FP8 = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
SCALE = 0.01


class LaterAttention(LlamaAttention):
    """As from transformers 5.24 on, which takes the former name with a warning."""

    def forward(self, hidden_states: Tensor, *, cache: Any = None, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            warnings.warn("past_key_values is deprecated", FutureWarning, stacklevel=2)
            cache = kwargs.pop("past_key_values")
        return super().forward(hidden_states, **{INSTALLED: cache}, **kwargs)


class EarlierAttention(LlamaAttention):
    """As before it, and in code that models bring along."""

    def forward(self, hidden_states: Tensor, *, past_key_values: Any = None, **kwargs: Any) -> Any:
        return super().forward(hidden_states, **{INSTALLED: past_key_values}, **kwargs)


KINDS = {"cache": LaterAttention, "past_key_values": EarlierAttention}
INSTALLED: Any = kv_cache_argument(tiny.llama().model.layers[0].self_attn)


def attention(kind: type[Module]) -> tuple[Any, Any, dict[str, Any]]:
    """A model, an attention module of it with another class, and what it is called with."""
    model = tiny.llama()
    module = model.model.layers[0].self_attn
    module.__class__ = kind
    torch.manual_seed(0)
    hidden = torch.randn(1, 6, model.config.hidden_size)
    positions = model.model.rotary_emb(hidden, torch.arange(6)[None])
    return model, module, {"hidden_states": hidden, "position_embeddings": positions}


def keys(module: Module, name: str, inputs: dict[str, Any]) -> Tensor:
    """What its cache holds after one call that names it ``name``."""
    cache = DynamicCache()
    module(**inputs, **{name: cache})
    found: Tensor = cache.layers[0].keys
    return found


def attach(module: Module, *states: str) -> None:
    attach_attention(module, FP8, {f"{each}_scale": torch.tensor([SCALE]) for each in states})


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_what_is_cached_is_rounded_by_each_name(name: str) -> None:
    model, module, inputs = attention(KINDS[name])
    assert is_cached_attention(module)
    plain, without = keys(module, name, inputs), module(**inputs)[0]
    enable_attention_hooks(model, module, queries=False)
    assert torch.equal(keys(module, name, inputs), plain)
    attach(module, "k", "v")
    expected = fake_quantize(plain, torch.tensor([SCALE]), None, FP8)
    assert torch.equal(keys(module, name, inputs), expected)
    assert torch.equal(keys(copy.deepcopy(module), name, inputs), expected)
    assert not torch.equal(module(**inputs)[0], without)  # as it is calibrated: it gets no cache


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_queries_are_rounded_by_each_name(name: str) -> None:
    model, module, inputs = attention(KINDS[name])
    plain = keys(module, name, inputs)
    enable_attention_hooks(model, module, queries=True)
    assert hasattr(module, IMPL_ATTR)
    attach(module, "q", "k", "v")
    expected = fake_quantize(plain, torch.tensor([SCALE]), None, FP8)
    assert torch.equal(keys(module, name, inputs), expected)


@pytest.mark.parametrize("queries", [False, True])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_untapping_leaves_nothing(name: str, *, queries: bool) -> None:
    model, module, inputs = attention(KINDS[name])
    before = keys(module, name, inputs)
    names = set(quantized_attention_tensors(model, module, cache_scheme(FP8), queries=queries))
    assert names == {"k_scale", "v_scale", *(["q_scale"] if queries else [])}
    enable_attention_hooks(model, module, queries=queries)
    disable_attention_hooks(model, module)
    assert not hasattr(module, KV_CACHE_ATTR)
    assert not module._forward_pre_hooks
    assert not module._forward_pre_hooks_with_kwargs
    assert torch.equal(keys(module, name, inputs), before)


@torch.no_grad()
def test_the_cache_is_given_by_transformers_own_name() -> None:
    """Whatever it is, no warning comes of it: here warnings are errors."""
    model, data = tiny.llama(), tiny.batches(number=1)
    for layer in model.model.layers:
        enable_attention_hooks(model, layer.self_attn, queries=True)
        attach(layer.self_attn, "q", "k", "v")
    cached = cache_of(model(**data[0], use_cache=True))
    assert cached.layers[1].keys.unique().numel() < 2**8
    model(**data[0], use_cache=False)
