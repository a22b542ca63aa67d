# SPDX-License-Identifier: Apache-2.0
"""Hooks of modifiers run, can be switched off, and can be shown inputs without a module's run."""

from __future__ import annotations

import _thread
import threading
from copy import deepcopy

import pytest
import torch
from greenlet import greenlet
from torch import nn

from llmcompressor.modeling.hooks import HooksMixin, has_output_hooks, run_input_hooks


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


def test_one_handle_may_be_kept(layer, calls):
    owner = HooksMixin()
    kept = hook(owner, layer, calls, "kept")
    hook(owner, layer, calls, "silent")
    with HooksMixin.disable_hooks(keep=kept):
        run(layer)
    assert calls == ["kept"]


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "full_backward_pre"])
def test_kinds_on_modules(layer, calls, kind):
    owner = HooksMixin()
    hook(owner, layer, calls, kind, kind)
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls == [kind]
    owner.remove_hooks()
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls == [kind]


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_what_a_hook_makes_inside_inference_mode_can_be_changed_outside(layer, kind):
    made = []
    owner = HooksMixin()
    owner.register_hook(layer, lambda _, args, *__: made.append(args[0].sum(0)), kind)
    with torch.inference_mode():
        run(layer)
        assert torch.is_inference_mode_enabled()
    made[0] += 1
    assert made[0].tolist() == [2.0, 2.0]
    assert not made[0].requires_grad


@pytest.mark.parametrize("kind", ["hook", "post_accumulate_grad"])
def test_kinds_on_parameters(layer, calls, kind):
    owner = HooksMixin()
    hook(owner, layer.weight, calls, kind, kind)
    run(layer)
    layer(torch.ones(1, 2)).sum().backward()
    with HooksMixin.disable_hooks():
        layer(torch.ones(1, 2)).sum().backward()
    assert calls == [kind]


def test_options_of_torch_are_passed_on(layer):
    owner = HooksMixin()
    owner.register_hook(
        layer,
        lambda _, args, kwargs: (args, {"input": -kwargs["input"]}),
        "forward_pre",
        with_kwargs=True,
    )
    x = torch.ones(1, 2)
    assert torch.equal(layer(input=x), nn.functional.linear(-x, layer.weight, layer.bias))


def test_unknown_kind_suggests_the_nearest(layer):
    with pytest.raises(ValueError, match=r"'foward_pre' on a Linear.*Did you mean forward_pre"):
        HooksMixin().register_hook(layer, print, "foward_pre")
    with pytest.raises(ValueError, match=r"'forward' on a Parameter"):
        HooksMixin().register_hook(layer.weight, print, "forward")


def test_removing_some_leaves_the_others(layer, calls):
    owner = HooksMixin()
    first = hook(owner, layer, calls, "first")
    hook(owner, layer, calls, "second")
    owner.remove_hooks({first})
    run(layer)
    assert calls == ["second"]
    owner.remove_hooks()
    owner.remove_hooks()
    run(layer)
    assert calls == ["second"]
    assert not layer._forward_pre_hooks


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


def test_an_error_restores_too(layer, calls):
    hook(HooksMixin(), layer, calls, "a")
    with pytest.raises(KeyError), HooksMixin.disable_hooks():
        raise KeyError
    run(layer)
    assert calls == ["a"]


def test_other_peoples_hooks_are_left_alone(layer, calls):
    layer.register_forward_pre_hook(lambda *_: calls.append("torch"))
    with HooksMixin.disable_hooks():
        run(layer)
        run_input_hooks(layer, (torch.ones(1, 2),))
    assert calls == ["torch"]


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


def test_a_coroutine_of_the_same_thread_is(layer, calls):
    hook(HooksMixin(), layer, calls, "a")
    coroutine = greenlet(lambda: run(layer))
    with HooksMixin.disable_hooks():
        coroutine.switch()
    assert calls == []


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_backward_in_threads_of_autograd_obeys(calls):
    layer, owner = nn.Linear(2, 2, device="cuda"), HooksMixin()
    kept = hook(owner, layer, calls, "module", "full_backward")
    hook(owner, layer.weight, calls, "weight", "post_accumulate_grad")
    x = torch.ones(1, 2, device="cuda", requires_grad=True)
    with HooksMixin.disable_hooks(keep={kept}):
        layer(x).sum().backward()
    assert calls == ["module"]
    with HooksMixin.disable_hooks():
        layer(x).sum().backward()
    assert calls == ["module"]
    layer(x).sum().backward()
    assert sorted(calls) == ["module", "module", "weight"]


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


# ---- showing inputs without running the module


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


def test_input_hooks_obey_the_switch(layer, calls):
    a = hook(HooksMixin(), layer, calls, "a")
    hook(HooksMixin(), layer, calls, "b")
    with HooksMixin.disable_hooks(keep={a}):
        run_input_hooks(layer, (), {})
    assert calls == ["a"]


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


def test_output_hooks_are_known(layer, calls):
    layer.register_forward_hook(lambda *_: None)
    assert not has_output_hooks(layer)
    owner = HooksMixin()
    hook(owner, layer, calls, "input")
    assert not has_output_hooks(layer)
    handle = hook(owner, layer, calls, "output", "forward")
    assert has_output_hooks(layer)
    with HooksMixin.disable_hooks():
        assert not has_output_hooks(layer)
        with HooksMixin.disable_hooks(keep={handle}):
            assert has_output_hooks(layer)
    owner.remove_hooks()
    assert not has_output_hooks(layer)


# ---- attention


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
