# SPDX-License-Identifier: Apache-2.0
"""Activations are observed where they flow, without padding, once per distinct input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from tests.support import tiny_llama as tiny
from torch.nn import Linear

from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.errors import NonFiniteError, TargetError
from llmcompressor.observers.base import Observer
from llmcompressor.quantization.activations import ActivationObservers
from llmcompressor.quantization.attach import enable_attention_hooks
from llmcompressor.schemes.presets import preset_scheme

STATIC = QuantizationArgs(num_bits=8, strategy="tensor", observer="static_minmax")
MASK = torch.tensor([[True, True, False], [True, False, False]])


class Watching(Modifier):
    """Has hooks, and nothing else."""

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        return True


@pytest.fixture
def observers() -> Iterator[ActivationObservers]:
    modifier = Watching()
    yield ActivationObservers(modifier, State())
    modifier.remove_hooks()


def scheme(**fields: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], **fields)


def masked(observers: ActivationObservers, mask: torch.Tensor | None = MASK) -> None:
    observers._state.calibration.token_mask = mask


def test_inputs_and_outputs_of_real_tokens_count(observers: ActivationObservers) -> None:
    module = Linear(4, 2, bias=False)
    torch.nn.init.constant_(module.weight, 0.5)
    observers.watch_linear(module, "m", scheme(input_activations=STATIC, output_activations=STATIC))
    masked(observers)
    x = torch.arange(24.0).reshape(2, 3, 4)
    module(x)
    found = observers.parameters(module)
    assert set(found) == {"input_scale", "output_scale"}
    real = x[MASK]
    assert float(found["input_scale"]) == pytest.approx(float(real.max()) / 127.5)
    assert float(found["output_scale"]) == pytest.approx(float(real.sum(-1).max()) / 2 / 127.5)


@pytest.mark.parametrize("mask", [None, torch.ones(4, 3, dtype=torch.bool)])
def test_batches_that_are_run_as_one_count_one_by_one(
    observers: ActivationObservers, mask: torch.Tensor | None
) -> None:
    """A moving average is that of the batches, whether they are looked at together or not."""
    module = Linear(4, 2)
    args = STATIC.model_copy(update={"observer": "minmax"})
    observers.watch_linear(module, "m", scheme(input_activations=args))
    x = torch.rand(4, 3, 4)
    observers._state.calibration.token_mask, observers._state.calibration.batch_sizes = mask, (2, 2)
    module(x)
    one_by_one = Observer.load_from_registry("minmax", base_name="input", args=args)
    for part in x.split(2):
        one_by_one.observe(part)
    assert torch.equal(observers.parameters(module)["input_scale"], one_by_one.qparams()[0])


@pytest.mark.parametrize("name", ["W8A8", "W4A16", "FP8_BLOCK", "MXFP4"])
def test_what_is_found_at_run_time_is_not_observed(
    name: str, observers: ActivationObservers
) -> None:
    module = Linear(128, 2)
    observers.watch_linear(module, "m", preset_scheme(name))
    assert not module._forward_pre_hooks
    assert observers.parameters(module) == {}


def test_an_expert_of_zero_inputs_has_the_least_global_scale(
    observers: ActivationObservers,
) -> None:
    """Engines take the least for all experts, so one that stands for nothing must not be less."""
    experts = [Linear(32, 2) for _ in range(4)]
    for index, size in enumerate([2.0, 0.0, 4.0, 1e-36]):
        observers.watch_linear(experts[index], f"0.experts.{index}.down", preset_scheme("NVFP4"))
        experts[index](torch.full((1, 32), size))
    found = []
    for module in experts:  # each is forgotten when it is finished
        found += observers.parameters(module)["input_global_scale"].tolist()
        observers.forget([module])
    assert found == [448 * 6 / 2, 448 * 6 / 4, 448 * 6 / 4, 448 * 6 / 4]

    alone = Linear(32, 2)
    observers.watch_linear(alone, "1.experts.0.down", preset_scheme("NVFP4"))
    alone(torch.zeros(1, 32))
    assert observers.parameters(alone)["input_global_scale"].tolist() == [1.0]


def test_modules_with_one_input_share_one_observer(observers: ActivationObservers) -> None:
    first, second, other = Linear(4, 2), Linear(4, 2), Linear(4, 2)
    asymmetric = STATIC.model_copy(update={"symmetric": False})
    observers.watch_linear(first, "first", scheme(input_activations=STATIC))
    observers.watch_linear(second, "second", scheme(input_activations=STATIC), source=first)
    observers.watch_linear(other, "other", scheme(input_activations=asymmetric), source=first)
    assert len(first._forward_pre_hooks) == 2
    assert not second._forward_pre_hooks
    first(torch.ones(1, 4))
    assert torch.equal(
        observers.parameters(first)["input_scale"], observers.parameters(second)["input_scale"]
    )
    assert "input_zero_point" in observers.parameters(other)


@pytest.mark.parametrize("base", ["input", "output"])
def test_a_static_scale_without_tokens_names_the_module(
    base: str, observers: ActivationObservers
) -> None:
    module = Linear(4, 2)
    observers.watch_linear(module, "a.b", scheme(**{f"{base}_activations": STATIC}))
    masked(observers, torch.zeros(1, 3, dtype=torch.bool))
    module(torch.ones(1, 3, 4))
    with pytest.raises(TargetError, match=rf"a\.b, whose {base} scale"):
        observers.parameters(module)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_are_an_error_unless_they_are_padding(
    bad: float, observers: ActivationObservers
) -> None:
    module = Linear(4, 2)
    observers.watch_linear(module, "a.b", scheme(input_activations=STATIC))
    masked(observers)
    x = torch.ones(2, 3, 4)
    x[~MASK] = bad
    module(x)
    x[0, 0, 0] = bad
    with pytest.raises(NonFiniteError, match=r"input activations of a\.b"):
        module(x)


@pytest.mark.parametrize("observer", ["static_minmax", "minmax"])
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_states_of_padding_do_not_count(
    strategy: str, observer: str, observers: ActivationObservers
) -> None:
    """A padded batch is as much one observation as one without padding."""
    args = QuantizationArgs(num_bits=8, strategy=strategy, observer=observer)
    model = tiny.llama()
    data = tiny.batches(number=3, tokens=4)
    module = model.model.layers[0].self_attn
    found = []
    for batches in (data, tiny.padded(data, 40)):
        modifier = Watching()
        own = ActivationObservers(modifier, State())
        for layer in model.model.layers:
            enable_attention_hooks(model, layer.self_attn, queries=True)
        own.watch_attention(module, "attention", args, ("q", "k", "v"))
        for batch in batches:
            masked(own, batch["attention_mask"].bool())
            tiny.logits(model, [batch])
        found.append(own.parameters(module))
        modifier.remove_hooks()
    assert set(found[0]) == {"q_scale", "k_scale", "v_scale"}
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], rtol=1e-5)
    heads = {"q_scale": 4, "k_scale": 2, "v_scale": 2}
    if strategy == "attn_head":
        assert {name: value.shape for name, value in found[0].items()} == {
            name: (number, 1, 1) for name, number in heads.items()
        }
