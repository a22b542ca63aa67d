# SPDX-License-Identifier: Apache-2.0
"""Hooks of modifiers run, can be switched off, and can be shown inputs without a module's run."""

from __future__ import annotations

import _thread
import threading
from copy import deepcopy

import pytest
import torch
from torch import nn

from llmcompressor.modeling.hooks import HooksMixin, run_input_hooks


@pytest.fixture
def calls():
    return []


@pytest.fixture
def layer():
    return nn.Linear(2, 2)


def run(layer):
    layer(torch.ones(1, 2))


def hook(owner, layer, calls, name, kind="forward_pre"):
    return owner.register_hook(layer, lambda *_: calls.append(name), kind)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "full_backward_pre"])
def test_kinds_on_modules(layer, calls, kind):
    owner = HooksMixin()
    hook(owner, layer, calls, kind, kind)
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls == [kind]
    owner.remove_hooks()
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls == [kind]


def test_unknown_kind_suggests_the_nearest(layer):
    with pytest.raises(ValueError, match=r"'foward_pre' on a Linear.*Did you mean forward_pre"):
        HooksMixin().register_hook(layer, print, "foward_pre")
    with pytest.raises(ValueError, match=r"'forward' on a Parameter"):
        HooksMixin().register_hook(layer.weight, print, "forward")


def test_nesting_adds_up_and_leaving_restores(layer, calls):
    one, two = HooksMixin(), HooksMixin()
    a, b = hook(one, layer, calls, "a"), hook(two, layer, calls, "b")

    def heard():
        calls.clear()
        run(layer)
        return list(calls)

    with HooksMixin.disable_hooks():
        assert heard() == []
        with one.disable_hooks(keep={a}):
            assert heard() == ["a"]
            with HooksMixin.disable_hooks(keep={b}):
                assert heard() == ["a", "b"]
            with HooksMixin.disable_hooks():
                assert heard() == ["a"]
            assert heard() == ["a"]
        assert heard() == []
    assert heard() == ["a", "b"]


def test_another_thread_is_not_touched(layer, calls):
    hook(HooksMixin(), layer, calls, "a", "full_backward")
    with HooksMixin.disable_hooks():
        x = torch.ones(1, 2, requires_grad=True)
        thread = threading.Thread(target=lambda: layer(x).sum().backward())
        thread.start()
        thread.join()
        assert calls == ["a"]
        layer(x).sum().backward()
    assert calls == ["a"]


def in_foreign_thread(function):
    """Run it in a thread that Python's threading knows nothing of, as autograd's are."""
    done = threading.Event()
    _thread.start_new_thread(lambda: (function(), done.set()), ())
    assert done.wait(10)


def test_backward_hooks_in_a_foreign_thread_obey_whoever_waits(layer, calls):
    owner = HooksMixin()
    kept = hook(owner, layer.weight, calls, "kept", "hook")
    hook(owner, layer.weight, calls, "other", "hook")
    backward = nn.functional.linear(torch.ones(1, 2), layer.weight).sum().backward
    with HooksMixin.disable_hooks(keep={kept}):
        in_foreign_thread(lambda: backward(retain_graph=True))
    assert calls == ["kept"]
    in_foreign_thread(backward)
    assert calls == ["kept", "kept", "other"]


def test_copying_a_model_does_not_copy_the_modifier(layer, calls):
    class Heavy(HooksMixin):
        def listen(self, module, args):
            calls.append(self)

        def __deepcopy__(self, memo=None):
            raise AssertionError("copied")

    heavy = Heavy()
    heavy.register_hook(layer, heavy.listen, "forward_pre")
    run(deepcopy(layer))
    assert calls == [heavy]


def test_input_hooks_run_in_order_without_the_module(layer, calls):
    def forbidden(*_):
        raise AssertionError("ran")

    layer.forward = forbidden
    owner, x = HooksMixin(), torch.ones(1, 2)
    owner.register_hook(layer, lambda _, args: calls.append(("first", args)), "forward_pre")
    owner.register_hook(
        layer,
        lambda _, args, kwargs: calls.append(("second", args, kwargs)),
        "forward_pre",
        with_kwargs=True,
    )
    hook(owner, layer, calls, "output", "forward")
    assert run_input_hooks(layer, (x,), {"mask": None}) == ((x,), {"mask": None})
    assert calls == [("first", (x,)), ("second", (x,), {"mask": None})]


def test_input_hooks_may_replace_inputs_as_in_torch(layer):
    owner, x = HooksMixin(), torch.ones(1, 2)
    owner.register_hook(layer, lambda _, args: args[0] * 2, "forward_pre")
    owner.register_hook(layer, lambda _, args: (args[0] + 1,), "forward_pre")
    owner.register_hook(
        layer, lambda _, args, kwargs: (args, {"scale": 3}), "forward_pre", with_kwargs=True
    )
    args, kwargs = run_input_hooks(layer, (x,))
    assert torch.equal(args[0], x * 2 + 1)
    assert kwargs == {"scale": 3}


def test_taps_on_attention():
    from transformers import LlamaConfig, LlamaForCausalLM

    from llmcompressor.quantization.attach import enable_attention_hooks

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8,
    )
    model = LlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    owner, shapes = HooksMixin(), {}

    def tap(kind):
        return lambda _, states: shapes.update({kind: tuple(states.shape)})

    with pytest.raises(RuntimeError, match=r"LlamaAttention.*tap_attention\(model"):
        owner.register_hook(attention, tap("query"), "query")
    for layer in model.model.layers:
        enable_attention_hooks(model, layer.self_attn, queries=True)
    for kind in ("query", "key", "value"):
        owner.register_hook(attention, tap(kind), kind)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with torch.no_grad(), HooksMixin.disable_hooks():
        model(tokens)
    assert shapes == {}
    with torch.no_grad():
        model(tokens)
    assert shapes == {"query": (1, 4, 3, 4), "key": (1, 2, 3, 4), "value": (1, 2, 3, 4)}
