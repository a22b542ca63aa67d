# SPDX-License-Identifier: Apache-2.0
"""A module that was attached runs as compressed-tensors runs what it has read."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_metadata import QuantizationMetadata
from tests.support import tiny_llama as tiny
from tests.support.caches import cache_of
from tests.support.pairs import each
from tests.support.presets import USUAL
from torch import Tensor
from torch.nn import Embedding, Linear, Module

from llmcompressor.quantization.attach import (
    attach_attention,
    attach_linear,
    cached_attention_modules,
    disable_attention_hooks,
    enable_attention_hooks,
)
from llmcompressor.quantization.parameters import WeightParameters, observe_weight
from llmcompressor.schemes.presets import preset_scheme

FP8 = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
INT8 = QuantizationArgs(num_bits=8, strategy="tensor")


def linear(dtype: torch.dtype = torch.bfloat16) -> Linear:
    torch.manual_seed(0)
    return Linear(256, 32, dtype=dtype)


def attached(
    module: Module, scheme: QuantizationScheme, **activations: Tensor
) -> WeightParameters | None:
    """``module`` with its weight rounded, and what for."""
    parameters = None
    if scheme.weights is not None:
        weight: Any = module.weight
        parameters = observe_weight(weight.detach(), scheme.weights)
        weight.data = parameters.round(weight.data)
    with torch.no_grad():
        attach_linear(module, scheme, parameters, activations)
    return parameters


@each(dtype=[torch.bfloat16, torch.float16, torch.float32], name=USUAL)
def test_parameters_are_stored_as_readers_expect_them(name: str, dtype: torch.dtype) -> None:
    module, scheme = linear(dtype), preset_scheme(name)
    given = {}
    if name == "FP8":
        given["input_scale"] = torch.tensor([0.5])
    if name == "NVFP4":
        given["input_global_scale"] = torch.tensor([100.0])
    parameters = attached(module, scheme, **given)
    assert parameters is not None
    assert module.weight_scale.dtype is dtype
    assert torch.equal(module.weight_scale.float(), parameters.scale.float())
    assert hasattr(module, "weight_zero_point") == name.endswith("_ASYM")
    assert hasattr(module, "weight_global_scale") == name.startswith("NVFP4")
    assert not any(each.requires_grad for n, each in module.named_parameters() if "scale" in n)
    assert module.quantization_scheme is scheme
    assert module.quantization_status is QuantizationStatus.DECOMPRESSED


@torch.no_grad()
def test_static_inputs_are_rounded_on_their_scale() -> None:
    scheme = QuantizationScheme(targets=["Linear"], weights=INT8, input_activations=INT8)
    module, x = linear(torch.float32), torch.randn(4, 256)
    scale = torch.tensor([0.05])
    attached(module, scheme, input_scale=scale)
    rounded = (x / 0.05).round().clamp(-128, 127) * 0.05
    expected = torch.nn.functional.linear(rounded, module.weight, module.bias)
    assert torch.allclose(module(x), expected, atol=1e-5)


@torch.no_grad()
def test_outputs_are_rounded_on_their_scale() -> None:
    scheme = QuantizationScheme(targets=["Linear"], output_activations=INT8)
    module, x = linear(torch.float32), torch.randn(4, 256)
    before = module(x)
    attached(module, scheme, output_scale=torch.tensor([0.05]))
    assert torch.allclose(module(x), (before / 0.05).round().clamp(-128, 127) * 0.05, atol=1e-5)


@torch.no_grad()
def test_dynamic_inputs_are_rounded_token_by_token() -> None:
    module, x = linear(torch.float32), torch.randn(4, 256)
    x[:, 0] = 5.0  # a negative extreme would lie half way between two codes
    attached(module, preset_scheme("W8A8"))
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    rounded = (x / scale).round().clamp(-128, 127) * scale
    expected = torch.nn.functional.linear(rounded, module.weight, module.bias)
    assert torch.allclose(module(x), expected, atol=1e-5)


@torch.no_grad()
def test_an_embedding_looks_up_rounded_rows() -> None:
    torch.manual_seed(0)
    table = Embedding(16, 64)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    parameters = attached(table, QuantizationScheme(targets=["Embedding"], weights=args))
    assert parameters is not None
    ids = torch.tensor([[3, 1]])
    assert torch.equal(table(ids), parameters.round(table.weight)[ids])


@pytest.mark.parametrize("queries", [False, True])
def test_taps_change_nothing_and_come_off_without_a_trace(queries: bool) -> None:
    model, data = tiny.llama(), tiny.batches(number=1)
    before = tiny.logits(model, data)
    implementation = model.config._attn_implementation
    found = cached_attention_modules(model)
    assert list(found.values()) == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    for module in found:
        enable_attention_hooks(model, module, queries=queries)
    assert tiny.traces(model)
    assert torch.equal(tiny.logits(model, data), before)
    for module in found:
        disable_attention_hooks(model, module)
    assert tiny.traces(model) == {}
    assert model.config._attn_implementation == implementation
    assert torch.equal(tiny.logits(model, data), before)


@torch.no_grad()
def test_keys_are_rounded_on_their_scale_once_attached() -> None:
    model, data = tiny.llama(), tiny.batches(number=1)
    plain = cache_of(tiny.llama()(**data[0], use_cache=True))
    for module in cached_attention_modules(model):
        enable_attention_hooks(model, module, queries=False)
        scales = {name: torch.tensor([0.01]) for name in ("k_scale", "v_scale")}
        attach_attention(module, FP8, scales)
    cache = cache_of(model(**data[0], use_cache=True))
    keys = plain.layers[0].keys
    expected = fake_quantize(keys, torch.tensor([0.01]), None, FP8)
    assert not torch.equal(keys, expected)
    assert torch.allclose(cache.layers[0].keys, expected, atol=1e-6)


def copied(module: Module, form: str) -> Any:
    """A copy of a module, by one of the ways that there are."""
    if form == "deepcopy":
        return copy.deepcopy(module)
    if form == "pickle":
        return pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("form", ["deepcopy", "pickle", "torch"])
def test_a_copy_of_a_module_quantizes_its_inputs_by_itself(form: str) -> None:
    module = linear(torch.float32)
    attached(module, preset_scheme("FP8"), input_scale=torch.tensor([0.05]))
    values = torch.randn(3, 256)
    expected = module(values)
    twin = copied(module, form)
    assert torch.equal(twin(values), expected)
    twin.input_scale.data.mul_(8)
    assert not torch.equal(twin(values), expected)
    assert torch.equal(module(values), expected)
    QuantizationMetadata.clear_quantization(twin)  # as compressed-tensors takes it back
    assert torch.equal(twin(values), Linear.forward(twin, values))
