# SPDX-License-Identifier: Apache-2.0
"""Fake quantization of weights and activations: every path, its values and its gradients."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from tests.support.pairs import each
from tests.support.presets import USUAL
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.numerics.scales import effective_scale
from llmcompressor.numerics.straight_through import lsq_gradient_scale
from llmcompressor.quantization.fake_quantize import (
    WEIGHT_STEP,
    ActivationFakeQuantizer,
    WeightFakeQuantizer,
)
from llmcompressor.quantization.parameters import min_max_parameters, observe_weight
from llmcompressor.schemes.bridge import grid_of, partition_of
from llmcompressor.schemes.presets import PRESETS, preset_scheme

TENSOR = {"num_bits": 8, "strategy": "tensor"}
DYNAMIC: dict[str, QuantizationArgs] = {
    "token": QuantizationArgs(num_bits=8, strategy="token", dynamic=True),
    "token, 4 bits": QuantizationArgs(num_bits=4, strategy="token", dynamic=True),
    "token, asymmetric": QuantizationArgs(strategy="token", dynamic=True, symmetric=False),
    "token, float": QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True),
    "tensor": QuantizationArgs(num_bits=8, strategy="tensor", dynamic=True),
    "group": QuantizationArgs(num_bits=4, strategy="group", group_size=16, dynamic=True),
    "group, float": preset_scheme("FP8_BLOCK").input_activations,
    "mx": preset_scheme("MXFP4").input_activations,
    "mx, 8 bits": preset_scheme("MXFP8").input_activations,
    "local": preset_scheme("NVFP4").input_activations,
}
STATIC: dict[str, QuantizationArgs] = {
    "tensor": QuantizationArgs(**TENSOR),
    "tensor, asymmetric": QuantizationArgs(**TENSOR, symmetric=False),
    "tensor, float": QuantizationArgs(num_bits=8, type="float", strategy="tensor"),
    "tensor, 4 bits": QuantizationArgs(num_bits=4, strategy="tensor"),
}
R, C = 8, 128


def linear(dtype: torch.dtype = torch.float32) -> Linear:
    torch.manual_seed(0)
    return Linear(C, R, bias=False, dtype=dtype)


def activation(dtype: torch.dtype = torch.float32, *shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (2, 3, C)), dtype=torch.float64).to(dtype)


def fake(
    args: QuantizationArgs, module: Module | None = None, **fields: Any
) -> ActivationFakeQuantizer:
    """The fake quantization of an input that has seen a step, of which parts will be clipped."""
    module = module or linear()
    one = ActivationFakeQuantizer(
        module, "a.b", "input", args, learned=fields.get("learned", False)
    )
    one.register()
    if one.observer is not None:
        one.collect(0.6 * activation(module.weight.dtype), None)
        one.commit([one.collected()])
    return one


def differences(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    found, step = torch.zeros_like(at), 1e-6 * float(at.abs().mean())
    for index in range(at.numel()):
        up, down = at.clone(), at.clone()
        up.view(-1)[index] += step
        down.view(-1)[index] -= step
        found.view(-1)[index] = (function(up) - function(down)) / (2 * step)
    return found


class Definition:
    """x' = (clamp(x / s + z) + c - z) s, with c such that it gives ``rounded`` at ``x``, ``s``."""

    def __init__(
        self, x: Tensor, rounded: Tensor, scale: Tensor, zero: Tensor | None, args: QuantizationArgs
    ) -> None:
        grid = grid_of(args)
        self.ends = (grid.qmin, grid.qmax)
        self.zero = torch.zeros(()) if zero is None else zero.double()
        self.x, self.scale = x.detach().double(), scale.detach().double()
        limited = self.limited(self.x, self.scale)
        codes = grid.round(rounded.detach().double() / self.scale + self.zero)
        self.held = codes - limited

    def limited(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale + self.zero).clamp(*self.ends)

    def __call__(self, x: Tensor, scale: Tensor) -> Tensor:
        return (self.limited(x, scale) + self.held - self.zero) * scale

    @property
    def smooth(self) -> Tensor:
        """Where the definition has a derivative: away from the ends of the grid."""
        t = self.x / self.scale + self.zero
        return ((t - self.ends[0]).abs() > 1e-3) & ((t - self.ends[1]).abs() > 1e-3)

    def check(self, gradient: Tensor, weights: Tensor) -> None:
        """The gradient of the sum of ``weights`` times the values."""
        step = 1e-6  # each value depends on its own x alone: all differences at once
        up, down = self(self.x + step, self.scale), self(self.x - step, self.scale)
        expected = (up - down) / (2 * step) * weights
        smooth = self.smooth
        assert float(smooth.double().mean()) > 0.9
        assert torch.allclose(gradient.double()[smooth], expected[smooth], atol=1e-4)


def reader(args: QuantizationArgs, stored: dict[str, Tensor], dtype: torch.dtype) -> Module:
    """A module as a reader of the checkpoint has it."""
    module = linear(dtype)
    module.quantization_scheme = QuantizationScheme(targets=["Linear"], input_activations=args)
    module.quantization_status = QuantizationStatus.FROZEN
    for name, value in stored.items():
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    return module


@each(
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    args=[*DYNAMIC.values(), *STATIC.values()],
)
def test_activations_are_rounded_as_readers_do_it(
    args: QuantizationArgs, dtype: torch.dtype
) -> None:
    one = fake(args, linear(dtype))
    twin = reader(args, one.stored(), dtype)
    for shape in ((2, 3, C), (5, C), (1, 1, C)):
        x = activation(dtype, *shape)
        expected = forward_quantize(twin, x, "input", args)
        assert torch.equal(one(x.clone().requires_grad_()), expected)


@pytest.mark.parametrize("args", DYNAMIC.values(), ids=DYNAMIC)
def test_dynamic_activations_pass_gradients_as_defined(args: QuantizationArgs) -> None:
    one, x, weights = fake(args), activation().requires_grad_(), activation().flip(0).double()
    rounded = one(x)
    (rounded * weights.float()).sum().backward()
    shared = one.stored().get("input_global_scale")
    scale, zero = compute_dynamic_scales_and_zp(x.detach(), args, one.module, shared)
    scale = effective_scale(scale, shared)
    if args.group_size is not None:
        scale = scale.repeat_interleave(args.group_size, -1)
        zero = zero.repeat_interleave(args.group_size, -1)
    zero = None if args.symmetric else zero
    assert x.grad is not None
    Definition(x, rounded, scale, zero, args).check(x.grad, weights)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("args", STATIC.values(), ids=STATIC)
def test_static_activations_pass_gradients_as_defined(
    args: QuantizationArgs, learned: bool
) -> None:
    module = linear()
    one = fake(args, module, learned=learned)
    x, weights = activation().requires_grad_(), activation().flip(0).double()
    rounded = one(x)
    (rounded * weights.float()).sum().backward()
    scale, zero = one.stored()["input_scale"], one.stored().get("input_zero_point")
    definition = Definition(x, rounded, scale, zero, args)
    assert x.grad is not None
    definition.check(x.grad, weights)
    assert (x.grad == 0).any()
    if learned:
        slope = differences(
            lambda s: (definition(definition.x, s) * weights).sum(), definition.scale
        )
        g = lsq_gradient_scale(C, grid_of(args))
        found = getattr(module, one.step_name).grad  # of p, with s = s0 exp(p)
        assert torch.allclose(found.double(), g * slope * definition.scale, rtol=1e-3)


def test_attention_states_are_observed_by_head_without_padding() -> None:
    args = QuantizationArgs(num_bits=8, strategy="attn_head")
    one = ActivationFakeQuantizer(linear(), "a", "k", args, learned=True)
    assert not one.learned
    states, mask = activation(torch.float32, 2, 4, 3, 8), torch.tensor([[1, 1, 0], [1, 1, 1]]) > 0
    one.collect(states, mask)
    one.commit([one.collected()])
    amax = states.transpose(1, 2)[mask].abs().amax((0, 2))
    assert torch.equal(one.stored()["k_scale"].flatten(), amax / 127.5)
    values = states.clone().requires_grad_()
    rounded = one(values)
    rounded.sum().backward()
    scale = (amax / 127.5).reshape(1, 4, 1, 1)
    assert values.grad is not None
    Definition(states, rounded, scale, None, args).check(values.grad, torch.ones(()).double())


def weights_of(module: Linear, args: QuantizationArgs, **fields: Any) -> WeightFakeQuantizer:
    return WeightFakeQuantizer(
        {module: args}, {module: "a.b"}, {}, **{"learned": False, "follow": True, **fields}
    )


@each(dtype=[torch.float32, torch.bfloat16, torch.float16], name=USUAL)
def test_weights_are_rounded_as_they_will_be_stored(name: str, dtype: torch.dtype) -> None:
    module, args = linear(dtype), preset_scheme(name).weights
    weight = module.weight.detach()
    expected = observe_weight(weight, args)
    quick = min_max_parameters(weight, args)
    for field in ("scale", "zero_point", "global_scale"):
        one, other = getattr(expected, field), getattr(quick, field)
        assert (one is None and other is None) or torch.equal(one.float(), other.float())
    found = weights_of(module, args)
    assert torch.equal(found(module, module.weight), expected.round(weight))
    assert torch.equal(found.parameters(module).scale, expected.scale)


@each(
    learned=[False, True],
    name=["W8A16", "W4A16", "W4A16_ASYM", "W2A16", "FP8", "FP8_BLOCK", "NVFP4", "MXFP4", "MXFP8"]
    + [name for name in ("MXFP6A16",) if name in PRESETS],
)
def test_weights_get_gradients_as_defined(name: str, learned: bool) -> None:
    module, args = linear(), preset_scheme(name).weights
    found = weights_of(module, args, learned=learned)
    if learned:
        found.register()
        found(module, module.weight)  # the scales are found now, and are too small afterwards
        module.weight.data *= 1.4
    rounded, weights = found(module, module.weight), torch.randn(R, C, dtype=torch.float64)
    (rounded * weights.float()).sum().backward()
    parameters, partition, grid = found.parameters(module), partition_of(args), grid_of(args)
    scale = parameters.effective_scale
    wide_zero = None if args.symmetric else partition.expand(parameters.zero_point, R, C)
    wide = partition.expand(scale, R, C)
    definition = Definition(module.weight, rounded, wide, wide_zero, args)
    assert module.weight.grad is not None
    definition.check(module.weight.grad, weights)
    if learned:
        slope = differences(
            lambda s: (definition(definition.x, partition.expand(s, R, C)) * weights).sum(),
            scale.detach().double(),
        )
        g = lsq_gradient_scale(R * C // scale.numel(), grid)
        gradient = getattr(module, WEIGHT_STEP).grad
        first = found._present(module, module.weight).effective_scale
        expected = g * slope * first.double()
        assert torch.allclose(
            gradient.double(), expected, rtol=5e-3, atol=1e-5 * float(expected.abs().max())
        )


def test_scales_of_a_weight_that_was_written_to_are_found_anew() -> None:
    module, args = linear(), preset_scheme("W4A16").weights
    found = weights_of(module, args)
    before = found(module, module.weight)
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.allclose(found(module, module.weight), 2 * before)
    module.weight.data.mul_(2)  # leaves no trace, but comes with an event
    found.invalidate()
    assert torch.allclose(found(module, module.weight), 4 * before)


def test_at_a_cadence_scales_stay_until_they_are_renewed() -> None:
    module, args = linear(), preset_scheme("W4A16").weights
    found = weights_of(module, args, follow=False)
    scale = found.parameters(module).scale
    module.weight.data.mul_(2)
    found.invalidate()
    assert torch.equal(found.parameters(module).scale, scale)
    file = io.BytesIO()
    torch.save(found.state_dict(), file)
    file.seek(0)
    other = weights_of(module, args, follow=False)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.parameters(module).scale, scale)
    found.renew()
    assert torch.equal(found.parameters(module).scale, 2 * scale)


def test_fused_weights_share_the_present_global_scale() -> None:
    args = preset_scheme("NVFP4").weights
    a, b = linear(), linear()
    pair = (a, b)
    found = WeightFakeQuantizer(
        {a: args, b: args}, {a: "a", b: "b"}, {a: pair, b: pair}, learned=False, follow=True
    )
    for factor in (1.0, 3.0):
        with torch.no_grad():
            b.weight.mul_(factor)
        amax = float(b.weight.detach().abs().max())
        for one in pair:
            shared = found.parameters(one).global_scale
            assert shared is not None
            assert float(shared) == pytest.approx(448 * 6 / amax)
