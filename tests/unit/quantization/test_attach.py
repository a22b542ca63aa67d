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
from tests.support.presets import WITH_WEIGHTS
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from transformers import BertConfig, BertModel, Gemma4TextConfig

from llmcompressor.errors import TargetError
from llmcompressor.quantization.attach import (
    attach_attention,
    attach_linear,
    cache_scheme,
    cached_attention_modules,
    check_kv_shape_attributes,
    disable_attention_hooks,
    enable_attention_hooks,
    quantized_attention_tensors,
    set_parameter,
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", WITH_WEIGHTS)
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
def test_the_weight_is_not_rounded_again_at_every_forward() -> None:
    module, x = linear(), torch.randn(4, 256, dtype=torch.bfloat16)
    attached(module, preset_scheme("W8A16"))
    module.weight.data += 0.001
    assert torch.equal(module(x), torch.nn.functional.linear(x, module.weight, module.bias))


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


def test_a_parameter_takes_the_dtype_and_shape_that_were_reserved() -> None:
    module = linear()
    module.register_parameter("k_scale", torch.nn.Parameter(torch.empty(1, dtype=torch.float16)))
    set_parameter(module, "k_scale", torch.tensor(3.0, dtype=torch.float64))
    assert module.k_scale.dtype is torch.float16
    assert module.k_scale.shape == (1,)
    assert not module.k_scale.requires_grad
    set_parameter(module, "v_scale", torch.tensor([2.0]))
    assert module.v_scale.tolist() == [2.0]


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


def test_untapping_leaves_the_hooks_of_others() -> None:
    model = tiny.llama()
    module = model.model.layers[0].self_attn
    calls: list[Module] = []
    module.register_forward_pre_hook(lambda module, args: calls.append(module))
    enable_attention_hooks(model, module, queries=False)
    disable_attention_hooks(model, module)
    tiny.logits(model, tiny.batches(number=1))
    assert calls == [module]


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


@torch.no_grad()
def test_states_keep_their_dtype_where_an_attention_module_has_parameters_of_another() -> None:
    model, data = tiny.llama().to(torch.bfloat16), tiny.batches(number=1)
    for module in cached_attention_modules(model):
        module.sinks = torch.nn.Parameter(torch.zeros(4))
        planned = quantized_attention_tensors(model, module, cache_scheme(FP8), queries=False)
        assert planned["k_scale"].dtype is planned["v_scale"].dtype is torch.bfloat16
        assert planned["sinks"].dtype is torch.float32
        enable_attention_hooks(model, module, queries=False)
        scales = {name: torch.tensor([0.01]) for name in ("k_scale", "v_scale")}
        attach_attention(module, FP8, scales)
    cache = model(**data[0], use_cache=True).past_key_values
    assert cache.layers[0].keys.dtype is cache.layers[0].values.dtype is torch.bfloat16


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


@pytest.mark.parametrize("form", ["deepcopy", "pickle", "torch"])
def test_a_copy_of_a_model_has_a_cache_of_its_own(form: str) -> None:
    model = tiny.llama()
    for module in cached_attention_modules(model):
        enable_attention_hooks(model, module, queries=False)
        scales = {name: torch.tensor([0.25]) for name in ("k_scale", "v_scale")}
        attach_attention(module, FP8, scales)
    expected = tiny.logits(model, tiny.batches())
    twin = copied(model, form)
    assert torch.equal(tiny.logits(twin, tiny.batches()), expected)
    for module in cached_attention_modules(twin):
        module.k_scale.data.mul_(64)
    assert not torch.equal(tiny.logits(twin, tiny.batches()), expected)
    assert torch.equal(tiny.logits(model, tiny.batches()), expected)


def test_a_configuration_that_tells_shapes_by_layers_alone_is_refused() -> None:
    config = Gemma4TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], head_dim=8
    )
    model: Any = Module()
    model.config = config
    with pytest.raises(TargetError, match="Gemma4TextConfig does not tell for the model as a"):
        check_kv_shape_attributes(model)


def test_each_part_of_a_model_gets_its_attention_function_back() -> None:
    model: Any = tiny.llama()
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    model.part = BertModel(config, add_pooling_layer=False)
    model.part.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"
    attention = list(cached_attention_modules(model))
    for module in attention:
        enable_attention_hooks(model, module, queries=True)
    assert model.config._attn_implementation == config._attn_implementation == "ct_hooked_attention"
    for module in attention:
        disable_attention_hooks(model, module)
    assert model.config._attn_implementation == "sdpa"
    assert config._attn_implementation == "eager"
