# SPDX-License-Identifier: Apache-2.0
"""What must be there is, and nothing is left over: by headers and configuration alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.checkpoint_samples import HIDDEN, INNER, VOCABULARY, Sample, dense, made, sparse
from transformers import AutoConfig, AutoModelForCausalLM

from llmcompressor.verification import Deployment, Severity, TensorInfo, check_serving
from llmcompressor.verification.rules import presence
from llmcompressor.verification.transformers_model import Built

ERROR, WARNING = Severity.ERROR, Severity.WARNING
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


def found(sample: Sample, server: str | None = None) -> Said:
    headers = {
        name: TensorInfo(DTYPES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in sample.tensors.items()
    }
    said = check_serving(sample.config, headers, deployment=Deployment(server=server, tp=(1,)))
    return {(one.rule, one.module, one.severity) for one in said if one.severity != "note"}


def copy_layer(sample: Sample, source: int, target: int) -> None:
    for name, tensor in list(sample.tensors.items()):
        if f".{source}." in name:
            sample.tensors[name.replace(f".{source}.", f".{target}.")] = tensor


def test_a_whole_llama_has_no_finding() -> None:
    assert not found(llama())
    assert not found(llama(3), "vllm")


@pytest.mark.parametrize("missing", [(), ("model.layers.2.mlp.up_proj.weight",)])
def test_layers_that_the_class_counts_otherwise_are_not_missed(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration may count attention and what follows it as two layers."""
    sample = llama(2, num_hidden_layers=4)
    assert found(sample) == {("S70", "model.layers", ERROR)}
    built = Built("DoubledForCausalLM", {}, missing, {}, ())
    monkeypatch.setattr(presence, "build", lambda *_: built)
    assert found(sample) == ({("S70", "model.layers", ERROR)} if missing else set())


def test_the_last_norm_is_needed_where_layers_have_norms() -> None:
    sample = llama()
    sample.drop("model.norm.")
    for server in (None, "vllm", "transformers", "sglang"):
        assert found(sample, server) == {("S70", "model.norm", ERROR)}
    # an architecture that may be built without one
    sample.config["model_type"] = "something_else"
    assert found(sample) == {("S70", "model", WARNING)}
    for name in [name for name in sample.tensors if "layernorm" in name]:
        del sample.tensors[name]
    assert not found(sample)


def test_a_layer_beyond_the_count_is_no_draft_layer() -> None:
    sample = llama()
    copy_layer(sample, 1, 2)
    assert found(sample) == {("C2", "model.layers", ERROR)}


def test_a_count_that_is_too_small_is_no_draft_layer() -> None:
    sample = llama()
    sample.config["num_hidden_layers"] = 1
    assert found(sample) == {("C2", "model.layers", ERROR)}


def test_an_announced_draft_layer_is_none_too_many() -> None:
    sample = llama(num_nextn_predict_layers=1)
    copy_layer(sample, 1, 2)
    assert not found(sample)
    copy_layer(sample, 1, 3)
    assert found(sample) == {("C2", "model.layers", ERROR)}


def test_a_draft_layer_shows_by_what_it_holds() -> None:
    sample = llama()
    copy_layer(sample, 1, 2)
    projection = torch.ones(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16)
    sample.tensors["model.layers.2.eh_proj.weight"] = projection
    sample.settings["ignore"].append("model.layers.2.eh_proj")
    assert not found(sample)


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


def test_the_layers_of_a_decoder_are_counted_by_themselves() -> None:
    """Encoder-decoders have a count for each, and the general one is that of the encoder."""
    shapes = {
        f"model.decoder.layers.{index}.{own}": (HIDDEN, HIDDEN)
        for index in range(2)
        for own in ("self_attn.q_proj", "fc1")
    }
    config = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
    sample = made(shapes, num_hidden_layers=6, encoder_layers=6, decoder_layers=2, **config)
    assert not found(sample)
    sample.config["decoder_layers"] = 1
    assert found(sample) == {("C2", "model.decoder.layers", ERROR)}
    sample.config["decoder_layers"] = 3
    assert found(sample) == {("S70", "model.decoder.layers", ERROR)}


@pytest.mark.parametrize(
    ("name", "shape"), [("model.foo", (3,)), ("model.foo.weight", (4, HIDDEN)), ("foo", (3,))]
)
def test_a_tensor_that_nothing_explains_is_named(name: str, shape: tuple[int, ...]) -> None:
    sample = llama()
    sample.tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
    sample.settings["ignore"].append("model.foo")
    assert found(sample) == {("S71", name, WARNING)}
    assert found(sample, "vllm") == {("S71", name, ERROR)}  # it refuses unknown tensors


@pytest.mark.parametrize(
    "name", ["model.rotary_emb.inv_freq", "mtp.norm.weight", "lm_head.bias", "final_logits_bias"]
)
def test_tensors_with_a_reason_are_not(name: str) -> None:
    sample = llama()
    sample.tensors[name] = torch.ones(VOCABULARY, dtype=torch.bfloat16)
    assert not found(sample)


def test_a_classifier_has_a_reason_where_the_class_is_one() -> None:
    sample = llama()
    sample.tensors["score.weight"] = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
    sample.settings["ignore"].append("score")
    assert found(sample) == {("S71", "score.weight", WARNING)}
    sample.config["architectures"] = ["LlamaForSequenceClassification"]
    assert not found(sample)


def test_an_unknown_architecture_may_have_tensors_of_its_own() -> None:
    sample = llama(model_type="something_else")
    sample.tensors["model.hidden_scale"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    assert not found(sample)
    names = {name: TensorInfo("BF16", (HIDDEN,)) for name in ("model.hidden_scale",)}
    layer = {"model.layers.0.mlp.up_proj.weight": TensorInfo("BF16", (INNER, HIDDEN))}
    said = check_serving({**sample.config, "quantization_config": {}}, names | layer)
    noted = [one for one in said if one.rule == "S71"]
    assert [(one.module, one.severity) for one in noted] == [("model.hidden_scale", Severity.NOTE)]


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
    found = check_serving(written, headers)
    assert not [one for one in found if one.rule in ("C2", "S70", "S71")]


def test_what_only_one_layer_has_is_named() -> None:
    sample = llama(3)
    sample.tensors["model.layers.1.mlp.up_proj.bias"] = torch.ones(INNER, dtype=torch.bfloat16)
    assert found(sample) == {("S71", "model.layers.1", WARNING)}
    for index in (0, 2):
        path = f"model.layers.{index}.mlp.up_proj.bias"
        sample.tensors[path] = torch.ones(INNER, dtype=torch.bfloat16)
    assert not found(sample)
    sample.drop("model.layers.1.mlp.up_proj.bias")
    assert found(sample) == {("S70", "model.layers.1", ERROR)}


def small(embedding: str, layers: str, **config: Any) -> Sample:
    """Two Linears between an embedding of any name and, perhaps, a head of any name."""
    head = config.pop("head", None)
    names = [f"{layers}.{index}.ffn" for index in range(2)]
    shapes = dict.fromkeys(names, (HIDDEN, HIDDEN)) | {embedding: (VOCABULARY, HIDDEN)}
    shapes |= {head: (VOCABULARY, HIDDEN)} if head else {}
    sample = made(shapes, only=lambda name: name in names, ignore=(head,) if head else (), **config)
    sample.settings["ignore"] = [each for each in sample.settings["ignore"] if each != embedding]
    return sample


def test_an_embedding_of_one_letter_is_no_linear() -> None:
    config = {"architectures": ["CTRLLMHeadModel"], "model_type": "ctrl", "dtype": "float32"}
    assert not found(small("transformer.w", "transformer.h", **config))
    # the same matrix within a layer is a Linear that the configuration quantizes
    wrong = found(small("transformer.h.0.w", "transformer.h", **config))
    assert ("S19", "transformer.h.0.w", ERROR) in wrong


def test_a_head_may_have_another_name() -> None:
    config = {"architectures": ["RwkvForCausalLM"], "model_type": "something_else"}
    assert not found(small("rwkv.embeddings", "rwkv.blocks", head="head", **config))
    lacking = found(small("rwkv.embeddings", "rwkv.blocks", **config))
    assert lacking == {("S70", "lm_head", ERROR)}


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
            {
                name: TensorInfo(DTYPES[tensor.dtype], tuple(tensor.shape))
                for name, tensor in sample.tensors.items()
            },
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
