# SPDX-License-Identifier: Apache-2.0
"""What must be there is, and nothing is left over: by headers and configuration alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.checkpoint_samples import HIDDEN, Sample, dense, made, sparse
from transformers import AutoConfig, AutoModelForCausalLM

from llmcompressor.verification import Deployment, Severity, TensorInfo, check_serving
from llmcompressor.verification.transformers_model import build

ERROR = Severity.ERROR
ONE = Deployment(tp=(1,))
DTYPES = {torch.int32: "I32", torch.int64: "I64", torch.bfloat16: "BF16"}
Said = set[tuple[str, str, Severity]]


def llama(layers: int = 2, **config: Any) -> Sample:
    """A quantized Llama with its norms."""
    sample = made(dense(layers=layers), **{"num_hidden_layers": layers, **config})
    paths = [f"model.layers.{index}" for index in range(layers)]
    norms = [f"{path}.{own}_layernorm" for path in paths for own in ("input", "post_attention")]
    for name in [*norms, "model.norm"]:
        sample.tensors[f"{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    return sample


def headers_of(sample: Sample) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(DTYPES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in sample.tensors.items()
    }


def found(sample: Sample, server: str | None = None) -> Said:
    deployment = Deployment(server=server, tp=(1,))
    said = check_serving(sample.config, headers_of(sample), deployment=deployment)
    return {(one.rule, one.module, one.severity) for one in said if one.severity != "note"}


def test_a_whole_llama_has_no_finding() -> None:
    assert not found(llama())
    assert not found(llama(3), "vllm")


def test_layers_of_a_class_that_nobody_knows() -> None:
    sample = llama(3)
    sample.drop("model.layers.1.mlp.up_proj.")
    assert told(sample) == {("S70", "model.layers.1", ERROR)}
    sample.drop("model.layers.1.")
    assert told(sample) == {("S70", "model.layers", ERROR)}


def told(sample: Sample) -> Said:
    """Errors, where data may be read."""
    said = check_serving(
        sample.config, headers_of(sample), tensors=sample.tensors.__getitem__, deployment=ONE
    )
    return {(one.rule, one.module, one.severity) for one in said if one.severity == "error"}


def test_experts_of_a_draft_layer_are_not_looked_for() -> None:
    """transformers loads no draft layer, so plain experts there are no loss."""
    sample = made(sparse(), model_type="gpt_oss", num_nextn_predict_layers=1)
    for own in ("gate", "up", "down"):
        name = f"model.layers.2.mlp.experts.0.{own}_proj.weight"
        sample.tensors[name] = torch.zeros(HIDDEN, HIDDEN, dtype=torch.bfloat16)
    said = {module for rule, module, _ in found(sample, "transformers") if rule == "T6"}
    assert said == {f"model.layers.{index}.mlp.experts" for index in range(2)}


CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 1, "num_nextn_predict_layers": 1},
        {"layer_types": ["full_attention", "linear_attention"]},
    ],
)
def test_layers_without_keys_and_values_need_no_scales(config: dict[str, Any]) -> None:
    """Neither a draft layer nor one of linear attention is calibrated."""
    sample = llama(**config)
    sample.settings["kv_cache_scheme"] = CACHE
    for own in ("k_scale", "v_scale"):
        name = f"model.layers.0.self_attn.{own}"
        sample.tensors[name] = torch.tensor([0.5], dtype=torch.bfloat16)
    assert not {one for one in found(sample) if one[0] == "S54"}
    sample.config |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    assert ("S54", "model.layers.1.self_attn", ERROR) in found(sample)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("gpt2", {}),
        ("opt", {"do_layer_norm_before": False}),
        ("bloom", {}),
        ("ctrl", {}),
        ("bart", {"encoder_layers": 4, "decoder_layers": 2}),
        ("deepseek_v3", {"num_hidden_layers": 5, "n_routed_experts": 16}),
        ("gpt_oss", {"num_hidden_layers": 3}),
    ],
)
def test_what_transformers_builds_is_whole(model_type: str, config: dict[str, Any]) -> None:
    settings = AutoConfig.for_model(model_type, **config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    tied = getattr(model, "all_tied_weights_keys", {})
    headers = {
        name: TensorInfo("BF16", tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    written = settings.to_dict() | {"architectures": [type(model).__name__]}
    built = build(written, headers)
    assert built is not None
    assert not [*built.missing, *built.wrong, *built.unexpected]


def test_shared_keys_and_values_have_the_scales_of_their_source() -> None:
    sample = llama(num_kv_shared_layers=1, layer_types=["full_attention"] * 2)
    sample.settings["kv_cache_scheme"] = CACHE
    for own in ("k_proj", "v_proj"):
        sample.drop(f"model.layers.1.self_attn.{own}")
    for own in ("k_scale", "v_scale"):
        name = f"model.layers.0.self_attn.{own}"
        sample.tensors[name] = torch.tensor([0.5], dtype=torch.bfloat16)

    def said() -> set[tuple[str, str]]:
        report = check_serving(
            sample.config,
            headers_of(sample),
            tensors=sample.tensors.__getitem__,
        )
        return {(one.rule, one.module) for one in report if one.rule == "S54"}

    assert said() == {("S54", "model.layers.1.self_attn")}
    for own in ("k_scale", "v_scale"):
        scale = sample.tensors[f"model.layers.0.self_attn.{own}"]
        sample.tensors[f"model.layers.1.self_attn.{own}"] = scale.clone()
    assert not said()
    sample.tensors["model.layers.1.self_attn.v_scale"] *= 2
    assert said() == {("S54", "model.layers.1.self_attn.v_scale")}
