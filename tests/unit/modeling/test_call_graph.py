# SPDX-License-Identifier: Apache-2.0
"""What shares an input, and which norm feeds which Linear, is seen in a run."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from llmcompressor.errors import TargetError
from llmcompressor.modeling.call_graph import CallOrder, copy_arguments, trace_calls, trace_flow
from llmcompressor.modifiers.rotation.probe import InvarianceProbe


class Toy(nn.Module):
    """Calls its Linears as ``body`` says, by their names."""

    def __init__(self, body, names: str) -> None:
        super().__init__()
        self.body = body
        for name in names:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x):
        return self.body(self, x)


def _groups(model: Toy, **arguments) -> list[str]:
    order = _watch(model, **arguments)
    names = {module: name for name, module in model.named_children()}
    return ["".join(names[module] for module in group) for group in order.groups]


def _watch(model: Toy, **arguments) -> CallOrder:
    modules = {module: name for name, module in model.named_children()}
    return trace_calls(lambda: model(torch.ones(2, 3)), modules, **arguments)


def test_modules_with_one_tensor_are_a_group_in_call_order() -> None:
    def body(model, x):
        k, q, v = model.k(x), model.q(x), model.v(x)
        hidden = model.o(k + q + v)
        return model.d(model.g(hidden) * model.u(hidden))

    assert _groups(Toy(body, "qkvogud")) == ["kqv", "o", "gu", "d"]


def test_an_equal_tensor_is_not_the_same_tensor() -> None:
    assert _groups(Toy(lambda m, x: m.a(x) + m.b(x.clone()), "ab")) == ["a", "b"]


def test_a_tensor_changed_in_place_is_another_input() -> None:
    def body(model, x):
        a = model.a(x)
        x.mul_(2)
        return a + model.b(x) + model.c(x)

    assert _groups(Toy(body, "abc")) == ["a", "bc"]


def test_gone_tensors_are_not_confused_with_new_ones() -> None:
    def body(model, x):
        for name in "abcdef":
            x = model.get_submodule(name)(x.clone())
        return x

    assert _groups(Toy(body, "abcdef")) == list("abcdef")


def test_nothing_is_shared_between_regions() -> None:
    """Every decoder layer's cross attention gets the encoder's output."""

    def body(model, x):
        return model.a(x) + model.b(x) + model.c(x) + model.d(x)

    groups = _groups(Toy(body, "abcd"), region=lambda name: name in "ab")
    assert groups == ["ab", "cd"]


def test_a_module_called_again_is_alone_first_calls_in_order() -> None:
    def body(model, x):
        y = model.a(x) + model.b(x) + model.c(x)
        return model.a(y)

    model = Toy(body, "abc")
    assert _groups(model) == ["a", "bc"]
    order = _watch(model)
    assert [order.calls[module] for module in (model.a, model.b)] == [2, 1]
    assert order.group_of(model.c) == (model.b, model.c)
    assert order.group_of(model.a) == (model.a,)
    assert order.order == (model.a, model.b, model.c)


def test_a_split_divides_groups_by_key() -> None:
    model = Toy(lambda m, x: m.a(x) + m.b(x) + m.c(x), "abc")
    split = _watch(model).split(lambda module: module is model.b)
    assert split.groups == ((model.a, model.c), (model.b,))


def test_no_hook_is_left_behind_not_even_by_an_error() -> None:
    def body(model, x):
        raise ZeroDivisionError

    model = Toy(body, "ab")
    try:
        _watch(model)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError
    assert not any(module._forward_pre_hooks for module in model.modules())


SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def fed(model: Any) -> dict[str, str]:
    names = {module: name for name, module in model.named_modules()}
    return {names[one]: names[other] for one, other in trace_flow(model).feeder.items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norms_feed_linears(device: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().to(device))
    found = fed(model)
    layer = "model.layers.1"
    for name in ("q_proj", "k_proj", "v_proj"):
        assert found[f"{layer}.self_attn.{name}"] == f"{layer}.input_layernorm"
    for name in ("gate_proj", "up_proj"):
        assert found[f"{layer}.mlp.{name}"] == f"{layer}.post_attention_layernorm"
    assert found["lm_head"] == "model.norm"
    # sums and products make tensors of their own
    assert not {f"{layer}.mlp.down_proj", f"{layer}.input_layernorm"} & set(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_are_followed(dtype: torch.dtype) -> None:
    class Casting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50, 32)
            self.norm = torch.nn.RMSNorm(32)
            self.head = torch.nn.Linear(32, 50)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            normed = self.norm(self.embed(input_ids) * 2)
            return self.head(normed.to(self.head.weight.dtype))

    model = Casting()
    model.head.to(dtype)
    assert fed(model) == {"head": "norm"}


def test_the_model_is_left_as_it_was() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    trace_flow(model)
    assert all(module.training for module in model.modules())
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, KeyError])
def test_what_a_models_own_code_raises_is_told(error: type[Exception]) -> None:
    class Failing(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise error("no sound")

    for tried in (trace_flow, InvarianceProbe):
        with pytest.raises(TargetError, match=r"Failing does not run .*no sound"):
            tried(Failing())


STATES = torch.ones(1, 2, 3, 4)


def test_what_a_forward_writes_to_caches_is_not_seen() -> None:
    cache = DynamicCache()
    cache.update(STATES, STATES, 0)
    own = ({"past": cache, "shared": UserDict(a=STATES)}, [STATES])
    twin = copy_arguments(own)
    twin[0]["past"].update(STATES, STATES, 0)
    twin[0]["shared"]["b"] = STATES
    twin[1].append(STATES)
    assert cache.get_seq_length() == 3
    assert twin[0]["past"].get_seq_length() == 6
    assert list(own[0]["shared"]) == ["a"]
    assert len(own[1]) == 1


def test_what_a_cache_changes_in_place_is_its_own() -> None:
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=8)
    cache = StaticCache(config=config, max_cache_len=8)
    cache.update(STATES, STATES, 0)
    twin = copy_arguments(cache)
    twin.update(2 * STATES, 2 * STATES, 0)
    assert cache.get_seq_length() == 3
    assert float(cache.layers[0].keys.max()) == 1.0
    assert float(twin.layers[0].keys.max()) == 2.0


def test_a_copy_goes_with_its_last_name() -> None:
    """A cycle of references would hold the states of a device until Python searches for cycles."""
    gc.disable()
    try:
        twin = copy_arguments(([STATES.clone()], {"past": UserDict(a=STATES.clone())}))
        alive = [weakref.ref(twin[0][0]), weakref.ref(twin[1]["past"]["a"])]
        del twin
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_all_else_is_the_same() -> None:
    """Tensors are large, and modules are told apart by what they are."""
    module, lock = nn.Linear(2, 2), threading.Lock()
    output = BaseModelOutput(last_hidden_state=STATES)
    own = {"states": STATES, "module": module, "lock": lock, "flag": True, "output": output}
    twin = copy_arguments(own)
    assert twin is not own
    assert all(twin[name] is own[name] for name in ("states", "module", "lock", "flag"))
    assert twin["output"].last_hidden_state is STATES
