# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.utils import match_named_modules
from compressed_tensors.utils.match import match_targets
from tests.support import tiny_checkpoints as tiny
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from llmcompressor.checkpoint.packing import quantized_modules
from llmcompressor.checkpoint.quantization_config import build_quantization_config
from llmcompressor.schemes.presets import preset_scheme


def build(model: PreTrainedModel, **options: Any) -> dict[str, Any]:
    entries = quantized_modules(model)
    config = build_quantization_config(
        model, entries, status=QuantizationStatus.COMPRESSED, **options
    )
    assert config is not None
    return json.loads(json.dumps(config))


def by_compressed_tensors(model: PreTrainedModel, config: dict[str, Any]) -> dict[str, Any]:
    """Module → its weight arguments, found the way transformers finds them."""
    parsed = QuantizationConfig.model_validate(config)
    targets = {
        target: scheme for scheme in parsed.config_groups.values() for target in scheme.targets
    }
    return {
        name: targets[match_targets(name, module, targets)[0]].weights
        for name, module in match_named_modules(model, targets, parsed.ignore)
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }


def by_vllm(names: dict[str, str], config: dict[str, Any]) -> dict[str, Any]:
    """The same in vLLM's order: ignore, names in order, classes as substrings in order."""

    def named(name: str, entry: str) -> bool:
        return bool(re.match(entry[3:], name)) if entry.startswith("re:") else entry == name

    groups = sorted(config["config_groups"].items())
    targets = [(target, group) for _, group in groups for target in group["targets"]]
    found = {}
    for name, kind in names.items():
        if any(named(name, entry) for entry in config["ignore"]):
            continue
        hits = [group for target, group in targets if named(name, target)]
        hits += [group for target, group in targets if kind and target.lower() in kind.lower()]
        if hits:
            found[name] = hits[0]["weights"]
    return found


def expected(model: PreTrainedModel) -> dict[str, Any]:
    return {entry.name: entry.scheme.weights for entry in quantized_modules(model)}


def served_names(model: PreTrainedModel) -> dict[str, str]:
    head = model.get_output_embeddings()
    kinds = {torch.nn.Linear: "RowParallelLinear", torch.nn.Embedding: "VocabParallelEmbedding"}
    return {
        name: "" if module is head else kinds[type(module)]
        for name, module in model.named_modules()
        if type(module) in kinds
    }


def check_both_readers(model: PreTrainedModel, config: dict[str, Any]) -> None:
    wanted = expected(model)
    assert by_compressed_tensors(model, config) == wanted
    served = by_vllm(served_names(model), config).items()
    assert {name: QuantizationArgs.model_validate(args) for name, args in served} == wanted


def test_every_key_in_full() -> None:
    model = tiny.quantize_model(tiny.llama(), {"g": preset_scheme("NVFP4", ["Linear"])})
    config = build(model)
    assert set(config) == {
        "config_groups",
        "format",
        "global_compression_ratio",
        "ignore",
        "kv_cache_scheme",
        "quant_method",
        "quantization_status",
        "sparsity_config",
        "transform_config",
        "version",
    }
    assert config["quant_method"] == "compressed-tensors"
    assert config["quantization_status"] == "compressed"
    assert config["format"] == "nvfp4-pack-quantized"
    assert config["global_compression_ratio"] is None
    assert config["sparsity_config"] == {} == config["transform_config"]
    group = config["config_groups"]["group_0"]
    assert set(group) == {
        "targets",
        "weights",
        "input_activations",
        "output_activations",
        "format",
    }
    assert group["weights"]["scale_dtype"] == "torch.float8_e4m3fn"
    assert group["weights"]["group_size"] == 16
    assert {"actorder", "block_structure", "observer", "observer_kwargs"} <= set(group["weights"])
    assert set(group["weights"]) == set(QuantizationArgs.model_fields)
    assert group["input_activations"]["dynamic"] == "local"
    assert config["ignore"] == ["lm_head"]
    check_both_readers(model, config)


def test_how_arguments_came_about_is_no_matter() -> None:
    """Of those that were read from a file every key is set, of a preset's few are."""
    preset = preset_scheme("W4A16_ASYM", ["Linear"])
    stored = json.loads(json.dumps(build(tiny.quantize_model(tiny.llama(), {"g": preset}))))
    group = stored["config_groups"]["group_0"]
    reread = QuantizationScheme.model_validate(group)
    again = build(tiny.quantize_model(tiny.llama(), {"g": reread}))
    assert json.dumps(again) == json.dumps(stored)
    assert QuantizationArgs.model_validate(group["weights"]) == preset.weights


def test_no_ignore_is_an_empty_list() -> None:
    model = tiny.quantize_model(
        tiny.llama(), {"g": preset_scheme("W8A8", ["Linear", "re:.*lm_head"])}, ignore=()
    )
    config = build(model)
    assert config["ignore"] == []
    check_both_readers(model, config)


def test_a_head_reached_by_class_gets_a_name() -> None:
    """The class target reaches the head here, but not in vLLM."""
    model = tiny.quantize_model(tiny.llama(), {"g": preset_scheme("W8A8", ["Linear"])}, ignore=())
    config = build(model)
    assert any("lm_head" in target for target in config["config_groups"]["group_0"]["targets"])
    check_both_readers(model, config)


def test_patterns_stay_patterns() -> None:
    groups = {
        "a": preset_scheme("W4A16", ["re:.*self_attn.*"]),
        "b": preset_scheme("FP8_DYNAMIC", ["re:.*mlp.*"]),
    }
    model = tiny.quantize_model(tiny.llama(), groups)
    config = build(model)
    assert config["format"] == "mixed-precision"
    written = config["config_groups"]
    assert written["group_0"]["targets"] == ["re:.*self_attn.*"]
    assert written["group_0"]["format"] == "pack-quantized"
    assert written["group_1"]["format"] == "float-quantized"
    check_both_readers(model, config)


def test_overlapping_groups_are_written_by_name() -> None:
    """A class group with exceptions: readers differ in which one wins, names settle it."""
    groups = {
        "a": preset_scheme("W4A16", ["Linear"]),
        "b": preset_scheme("W8A8", ["re:.*down_proj"]),
    }
    model = tiny.quantize_model(tiny.llama(), groups)
    config = build(model)
    targets = config["config_groups"]["group_1"]["targets"]
    assert targets == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    check_both_readers(model, config)


def test_equal_targets_in_two_schemes_do_not_shadow_each_other() -> None:
    model = tiny.quantize_model(tiny.llama(), {"a": preset_scheme("W4A16", ["Linear"])})
    other = tiny.quantize_model(tiny.llama(), {"b": preset_scheme("W8A8", ["Linear"])})
    model.model.layers[1] = other.model.layers[1]
    config = build(model)
    assert len(config["config_groups"]) == 2
    check_both_readers(model, config)


def test_equal_schemes_are_one_group() -> None:
    groups = {
        "a": preset_scheme("W4A16", ["re:.*self_attn.*"]),
        "b": preset_scheme("W4A16", ["re:.*mlp.*"]),
    }
    model = tiny.quantize_model(tiny.llama(), groups)
    config = build(model)
    assert list(config["config_groups"]) == ["group_0"]
    assert config["config_groups"]["group_0"]["targets"] == ["re:.*self_attn.*", "re:.*mlp.*"]


def test_partly_quantized_lists_exact_names() -> None:
    model = tiny.quantize_model(
        tiny.llama(),
        {"g": preset_scheme("W4A16", ["Linear"])},
        ignore=("lm_head", "re:.*layers.0.*"),
    )
    config = build(model)
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]
    assert len(config["ignore"]) == 8
    assert not any(entry.startswith("re:") for entry in config["ignore"])
    check_both_readers(model, config)


def _borrowing(groups: dict[str, QuantizationScheme], *ignore: str) -> dict[str, Any]:
    """The first layer takes its keys for values, the second one both from elsewhere."""
    model = tiny.llama()
    first, second = (layer.self_attn for layer in model.model.layers)
    del first.v_proj, second.k_proj, second.v_proj
    return build(tiny.quantize_model(model, groups, ignore=("lm_head", *ignore)))


@pytest.mark.parametrize("layer", [0, 1])
def test_absent_keys_and_values_are_treated_as_queries(layer: int) -> None:
    """Engines join q, k and v there too, and ask for the scheme of each by name."""
    own, other = (
        {f"model.layers.{index}.self_attn.{name}_proj" for name in "qkv"}
        for index in (layer, 1 - layer)
    )
    by_name = {
        "a": preset_scheme("FP8", [f"re:.*layers.{layer}.*[qk]_proj", "re:.*o_proj"]),
        "b": preset_scheme("W4A16", ["re:.*mlp.*"]),
    }
    config = _borrowing(by_name)
    targets = set(config["config_groups"]["group_0"]["targets"])
    assert f"model.layers.{layer}.self_attn.v_proj" in targets
    assert not targets & other
    assert set(config["ignore"]) & {*own, *other} == other

    by_class = {"a": preset_scheme("FP8", ["Linear"])}
    config = _borrowing(by_class, f"re:.*layers.{layer}.self_attn.[qko].*")
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert set(config["ignore"]) & {*own, *other} == own


def test_embeddings() -> None:
    args = QuantizationArgs(num_bits=8, strategy="channel")
    groups = {"g": QuantizationScheme(targets=["Embedding"], weights=args)}
    model = tiny.quantize_model(tiny.llama(), groups)
    config = build(model)
    assert config["ignore"] == []
    assert config["config_groups"]["group_0"]["targets"] == ["Embedding"]
    check_both_readers(model, config)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_kv_cache(strategy: str) -> None:
    cache = QuantizationArgs(num_bits=8, type="float", strategy=strategy)
    model = tiny.quantize_model(
        tiny.llama(), {"g": preset_scheme("W4A16", ["Linear"])}, kv_cache=cache
    )
    config = build(model)
    assert config["kv_cache_scheme"]["strategy"] == strategy
    assert list(config["config_groups"]) == ["group_0"]
    assert config["ignore"] == ["lm_head"]
    alone = build(tiny.quantize_model(tiny.llama(), {}, kv_cache=cache))
    assert alone["config_groups"] == {}
    assert alone["kv_cache_scheme"]["num_bits"] == 8


def test_quantized_attention_is_one_target() -> None:
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    groups = {
        "a": preset_scheme("W4A16", ["Linear"]),
        "b": QuantizationScheme(targets=["re:.*self_attn$"], input_activations=args),
    }
    model = tiny.quantize_model(tiny.llama(), groups)
    config = build(model)
    assert config["config_groups"]["group_1"]["targets"] == ["LlamaAttention"]
    assert config["kv_cache_scheme"]["num_bits"] == 8


def test_routers_and_fused_experts_are_ignored() -> None:
    torch.manual_seed(0)
    sizes = {**tiny.SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    tiny.quantize_model(model, {"g": preset_scheme("W4A16", ["Linear"])})
    config = build(model)
    for layer in (0, 1):
        for block in ("mlp", "block_sparse_moe"):  # in the module tree, in the checkpoint
            assert f"model.layers.{layer}.{block}.gate" in config["ignore"]
            expert = f"model.layers.{layer}.{block}.experts.0.w1"
            patterns = [entry[3:] for entry in config["ignore"] if entry.startswith("re:")]
            assert any(re.match(pattern, expert) for pattern in patterns)
    assert set(by_compressed_tensors(model, config)) == set(expected(model))


@pytest.mark.parametrize("is_quantized", [True, False])
def test_experts_right_in_a_layer_are_meant_by_engine_names(
    is_quantized: bool,
) -> None:
    """Gemma 4's lie in ``layers.0.experts``, and vLLM looks for ``layers.0.moe.experts``."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma4_text",
        **{**tiny.SIZES, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0},
        **{"head_dim": 32, "global_head_dim": 32, "layer_types": ["full_attention"] * 2},
        **{"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1},
        moe_intermediate_size=32,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    groups = {"a": preset_scheme("FP8", ["Linear"])}
    if is_quantized:
        groups["b"] = preset_scheme("W8A16", ["re:.*layers.0.experts.*"])
        expert = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(128, 32)})
        for layer in model.model.layers:
            layer.experts = torch.nn.ModuleList([expert])
    written = build(tiny.quantize_model(model, groups))
    named = written["ignore"]
    if is_quantized:
        named = written["config_groups"]["group_1"]["targets"]
    own = "0.moe.experts.0.up_proj"
    patterns = [re.compile(entry[3:]) for entry in named if entry.startswith("re:")]
    for prefix in ("model", "language_model.model"):
        assert any(each.match(f"{prefix}.layers.{own}") for each in patterns)
