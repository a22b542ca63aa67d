# SPDX-License-Identifier: Apache-2.0
"""Which attention has a cache of keys and values, by what its code does."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from llmcompressor.errors import TargetError
from llmcompressor.schemes.attention import is_cached_attention, kv_cache_argument
from llmcompressor.schemes.checks import check_schemes
from llmcompressor.schemes.resolve import resolve_schemes


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class FullAttention(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.k_proj = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    @wrapped
    def forward(self, x: Tensor, past_key_values: Any = None) -> Any:
        return past_key_values.update(x, self.k_proj(x))


class InheritingAttention(FullAttention):
    def forward(self, x: Tensor, past_key_values: Any = None) -> Any:
        return super().forward(x, past_key_values)


class HelpedAttention(FullAttention):
    def forward(self, x: Tensor, past_key_values: Any = None) -> Any:
        return self.kept(x, past_key_values)

    def kept(self, x: Tensor, past_key_values: Any) -> Any:
        return [past_key_values.update(each, each) for each in x]


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(4, 4)

    def forward(self, x: Tensor, past_key_values: Any = None) -> Any:
        return past_key_values.set_state(self.k_proj(x))


class LaterAttention(FullAttention):
    """As from transformers 5.24 on."""

    @wrapped
    def forward(self, x: Tensor, cache: Any = None, **kwargs: Any) -> Any:
        return cache.update(x, self.k_proj(x))


class LaterLinearAttention(LinearAttention):
    def forward(self, x: Tensor, cache: Any = None, **kwargs: Any) -> Any:
        return cache.set_state(self.k_proj(x))


class OpenAttention(FullAttention):
    """It names nothing that it takes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class HalfAttention(FullAttention):
    """As in Whisper: readers put a cache of their own in the place of the one it looks into."""

    def forward(self, x: Tensor, past_key_values: Any = None) -> Any:
        if isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = past_key_values.self_attention_cache
        return super().forward(x, past_key_values)


class CacheAttention(nn.Module):
    """It has no projection of one of the names."""

    def forward(self, x: Tensor, past_key_values: Any = None) -> Any:
        return past_key_values.update(x, x)


@pytest.mark.parametrize(
    ("module", "is_cached"),
    [
        (FullAttention(), True),
        (InheritingAttention(), True),
        (HalfAttention(), False),
        (HelpedAttention(), True),
        (LinearAttention(), False),
        (CacheAttention(), False),
        (LaterAttention(), True),
        (LaterLinearAttention(), False),
        (OpenAttention(), False),
        (nn.Linear(4, 4), False),
    ],
)
def test_attention_with_a_cache_updates_it(module: nn.Module, is_cached: bool) -> None:
    assert is_cached_attention(module) == is_cached


@pytest.mark.parametrize(
    ("module", "given", "name"),
    [
        (FullAttention(), (), "past_key_values"),
        (LaterAttention(), ("x",), "cache"),
        (LaterAttention(), ("x", "cache"), "cache"),
        (LaterAttention(), ("past_key_values",), "past_key_values"),
        (LaterAttention(), ("past_key_values", "cache"), "cache"),
        (OpenAttention(), (), None),
        (OpenAttention(), ("past_key_value",), "past_key_value"),
        (SimpleNamespace(forward=3), (), None),
    ],
)
def test_the_argument_that_is_the_cache(
    module: Any, given: tuple[str, ...], name: str | None
) -> None:
    assert kv_cache_argument(module, dict.fromkeys(given)) == name


def test_a_target_of_both_reaches_cached_attention_alone() -> None:
    states = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    resolved = resolve_schemes(
        config_groups={"group_0": {"targets": ["re:.*attn$"], "input_activations": states}}
    )
    parts = nn.ModuleDict({"linear_attn": LinearAttention(), "attn": FullAttention()})
    model = nn.ModuleDict({"layer": parts})
    assert list(resolved.schemes_by_module(model)) == ["layer.attn"]


@pytest.mark.parametrize(
    ("states", "allowed"),
    [
        ({"strategy": "group", "group_size": 16, "dynamic": True}, "tensor or token"),
        (
            {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
            "tensor or token",
        ),
        ({"strategy": "attn_head"}, None),
        ({"strategy": "token", "dynamic": True}, None),
    ],
)
def test_strategies_that_states_cannot_have_are_refused(
    states: dict[str, Any], allowed: str | None
) -> None:
    model = nn.ModuleDict({"layer": nn.ModuleDict({"attn": FullAttention()})})
    group = {
        "targets": ["re:.*attn$"],
        "input_activations": {"num_bits": 8, "type": "float", **states},
    }
    schemes = resolve_schemes(config_groups={"group_0": group}).schemes_by_module(model)
    if allowed is None:
        check_schemes(model, schemes)
        return
    with pytest.raises(TargetError, match=f"of layer.attn has the strategy .* Use {allowed}"):
        check_schemes(model, schemes)
