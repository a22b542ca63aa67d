# SPDX-License-Identifier: Apache-2.0
"""What shares an input is seen, not read from names."""

from __future__ import annotations

import torch
from torch import nn

from llmcompressor.modeling.call_graph import CallOrder, trace_calls


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
