# SPDX-License-Identifier: Apache-2.0
"""From a modifier's fields to schemes, and from schemes to the modules of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    is_cached_attention_module,
)
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.schemes.presets import PRESETS, format_of, preset_scheme
from llmcompressor.schemes.resolve import resolve_schemes

W4 = {"num_bits": 4, "group_size": 32}
FLOAT6 = {"num_bits": 6, "type": "float", "group_size": 32}
HAS_6_BITS = "mxfp6-pack-quantized" in {one.value for one in CompressionFormat}
UNSTORED = r"g\.weights asks for 6-bit floats in a form that no format stores\. .*MXFP6\)\.$"
UNKNOWN = r"g\.weights is of 6-bit floats, .* does not have\. Install compressed-tensors 0\.20"


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**fields | changes))


# --- fields ---------------------------------------------------------------------------------


def test_a_preset_takes_the_modifier_s_targets() -> None:
    resolved = resolve_schemes(scheme="w4a16", targets="re:.*mlp.*", ignore="lm_head")
    assert list(resolved.groups) == ["group_0"]
    assert resolved.targets == ("re:.*mlp.*",)
    assert resolved.ignore == ("lm_head",)


def test_presets_with_targets_of_their_own() -> None:
    resolved = resolve_schemes(scheme={"FP8_DYNAMIC": "re:.*down_proj", "W4A16": ["Linear"]})
    assert [scheme.weights.num_bits for scheme in resolved.groups.values()] == [8, 4]
    assert resolved.targets == ("re:.*down_proj", "Linear")


def test_groups_in_all_three_forms() -> None:
    resolved = resolve_schemes(
        config_groups={
            "first": {"targets": ["a"], "weights": W4},
            "second": preset_scheme("FP8", ["b"]),
            "W8A8": ["c"],
        }
    )
    assert list(resolved.groups) == ["first", "second", "W8A8"]
    assert resolved.groups["first"].weights.strategy == "group"
    assert resolved.groups["W8A8"].input_activations.dynamic is True


def test_one_scheme_by_its_fields() -> None:
    resolved = resolve_schemes(scheme={"weights": W4}, targets=["re:.*mlp.*"])
    assert resolved.groups["group_0"].weights.group_size == 32
    assert resolved.targets == ("re:.*mlp.*",)


def test_a_format_that_cannot_hold_the_weights_is_refused() -> None:
    group = {"targets": ["Linear"], "weights": W4, "format": "float-quantized"}
    with pytest.raises(RecipeError, match=r"config_groups\.g .* float-quantized holds no weights"):
        resolve_schemes(config_groups={"g": group})


@pytest.mark.parametrize(
    ("weights", "inputs", "written"),
    [
        ({}, {}, "int-quantized"),
        ({}, {"symmetric": True}, "pack-quantized"),
        ({"num_bits": 3}, {}, "pack-quantized"),
        ({"symmetric": False}, {}, "pack-quantized"),
        ({}, {"num_bits": 4}, "pack-quantized"),
    ],
)
def test_inputs_with_zero_points_are_written_for_their_kernel(
    weights: dict[str, Any], inputs: dict[str, Any], written: str
) -> None:
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights={**W4, **weights},
        input_activations={
            "num_bits": 8,
            "strategy": "token",
            "dynamic": True,
            "symmetric": False,
            **inputs,
        },
    )
    assert format_of(scheme) == written


@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("zp_dtype", ["torch.uint8", "torch.int32", "torch.bfloat16"])
def test_zero_points_that_cannot_be_packed(strategy: str, zp_dtype: str) -> None:
    weights = {"num_bits": 4, "strategy": strategy, "symmetric": False, "zp_dtype": zp_dtype}
    weights |= {"group_size": 32} if strategy == "group" else {}
    group = {"targets": ["Linear"], "weights": weights}
    with pytest.raises(RecipeError, match=rf"config_groups\.g .*{zp_dtype}.*Leave zp_dtype out"):
        resolve_schemes(config_groups={"g": group})
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    with pytest.raises(RecipeError, match="zp_dtype"):
        resolve_schemes(config_groups={"g": scheme})
    for packable in (
        {**weights, "zp_dtype": None},
        {**weights, "zp_dtype": "torch.int8"},
        {**weights, "symmetric": True},
    ):
        resolve_schemes(config_groups={"g": {"targets": ["Linear"], "weights": packable}})
    unpacked = {**group, "weights": {**weights, "num_bits": 8}, "format": "int-quantized"}
    resolve_schemes(config_groups={"g": unpacked})


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_default_observers(name: str) -> None:
    scheme = resolve_schemes(scheme=name).groups["group_0"]
    if scheme.weights:
        assert scheme.weights.observer == "memoryless_minmax"
    if scheme.input_activations:
        expected = None if scheme.input_activations.dynamic is True else "static_minmax"
        assert scheme.input_activations.observer == expected


def test_observers_of_the_modifier_win_and_objects_stay() -> None:
    mine = preset_scheme("FP8")
    by_field = resolve_schemes(config_groups={"g": mine}, weight_observer="mse")
    by_dict = resolve_schemes(config_groups={"g": mine}, observer={"weights": "mse"})
    by_name = resolve_schemes(config_groups={"g": mine}, observer="mse")
    assert by_field == by_dict == by_name
    assert by_field.groups["g"].weights.observer == "mse"
    assert by_field.groups["g"].input_activations.observer == "static_minmax"
    assert mine == preset_scheme("FP8")


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({"scheme": "W4A16"}, False),
        ({"scheme": "FP8_DYNAMIC"}, False),
        ({"scheme": "FP8"}, True),
        ({"scheme": "NVFP4"}, True),
        ({"scheme": "MXFP4"}, False),
        ({"scheme": "UNQUANTIZED"}, False),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, True),
        (
            {
                "scheme": "W4A16",
                "kv_cache_scheme": {"num_bits": 8, "strategy": "token", "dynamic": True},
            },
            False,
        ),
    ],
)
def test_who_needs_calibration_data(fields: dict[str, Any], needs: bool) -> None:
    assert resolve_schemes(**fields).requires_calibration_data is needs


def group(**fields: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], **fields}}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "Nothing says how to quantize"),
        ({"scheme": "W4A16", "config_groups": {"W4A16": ["Linear"]}}, "both set"),
        (
            {"scheme": "W4A16", "observer": {"weights": "mse"}, "weight_observer": "mse"},
            "observer is set",
        ),
        ({"scheme": "W4A16", "observer": {"weight": "mse"}}, "Did you mean weights"),
        ({"scheme": "W4A16", "observer": ["mse"]}, "must be a mapping"),
        ({"scheme": "W4A16", "observer": {"weights": 3}}, "name of an observer"),
        ({"scheme": "W4A16", "targets": []}, "targets"),
        (
            {"scheme": "W4A16", "targets": ["re:"]},
            r"targets is \['re:'\]: an empty name or pattern",
        ),
        ({"scheme": "W4A16", "ignore": "re:"}, r"ignore is \['re:'\]: an empty name or pattern"),
        (
            {"config_groups": {"g": {"targets": ["Linear", "re:"], "weights": {"num_bits": 8}}}},
            r"config_groups\.g\.targets is \['Linear', 're:'\]: an empty name or pattern",
        ),
        ({"scheme": 4}, "scheme is 4"),
        ({"config_groups": ["W4A16"]}, "must be a mapping"),
        ({"config_groups": {"W4A61": ["Linear"]}}, "Did you mean W4A16"),
        ({"config_groups": {"g": {"weights": W4}}}, "has no targets"),
        (group(weight=W4), "Did you mean weights"),
        (group(weights={"num_bit": 4}), r"g\.weights has no field 'num_bit'.*num_bits"),
        (group(weights=[4]), "must be a mapping"),
        (group(weights={"num_bits": "four"}), r"g\.weights is not valid: num_bits"),
        (group(weights={"group_size": "32"}), r"g\.weights\.group_size is the text '32'.*quotes"),
        (group(weights={**FLOAT6, "group_size": 64}), UNSTORED if HAS_6_BITS else UNKNOWN),
        (group(weights={"strategy": "group"}), "group_size"),
        (group(weights={"strategy": "token", "dynamic": True}), "stored once"),
        (group(weights={"strategy": "attn_head"}), "attn_head"),
        (group(weights=W4, input_activations={"strategy": "channel"}), "not supported"),
        (group(weights=W4, format="mixed-precision"), "mixed-precision"),
        (group(weights={**W4, "actorder": "group"}), "actorder: static"),
        (group(weights={**W4, "actorder": True}), "dropped"),
        ({"kv_cache_scheme": {"bits": 8}}, "Did you mean num_bits"),
        (
            {"config_groups": {"W4A16": ["Linear"], "W8A8": ["Linear"]}},
            "'W4A16' and in 'W8A8'",
        ),
    ],
)
def test_wrong_fields_are_named_with_a_remedy(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        resolve_schemes(**fields)
    assert "pydantic" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("order", ["static", "weight", False, None])
def test_the_activation_orders_that_readers_know_are_taken(order: Any) -> None:
    scheme = resolve_schemes(**group(weights={**W4, "actorder": order})).groups["g"]
    assert scheme.weights.actorder in (order, "weight", None)


# --- modules --------------------------------------------------------------------------------

CASES = {
    "preset": {"scheme": "W4A16", "ignore": ["lm_head"]},
    "names before patterns before classes": {
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": {"num_bits": 2, "group_size": 16}},
            "b": {"targets": ["re:.*proj"], "weights": {"num_bits": 3, "group_size": 16}},
            "c": {
                "targets": ["model.layers.1.mlp.up_proj"],
                "weights": {"num_bits": 5, "group_size": 16},
            },
            "d": {"targets": ["re:.*layers.1"], "weights": {"num_bits": 6, "group_size": 16}},
            "e": {"targets": ["Embedding"], "weights": {"num_bits": 8, "group_size": 16}},
        },
        "ignore": ["re:.*v_proj", "lm_head"],
    },
    "ignore by class": {
        "config_groups": {"a": {"targets": ["re:.*"], "weights": W4}},
        "ignore": ["Embedding", "re:lm_head"],
    },
    "attention": {
        "config_groups": {
            "a": {"targets": ["LlamaAttention"], "input_activations": {"num_bits": 8}},
            "b": {"targets": ["re:.*mlp.*"], "weights": W4},
        }
    },
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_modules_get_the_scheme_that_the_library_would_apply(fields: dict[str, Any]) -> None:
    fields = {"config_groups": None, **fields}
    model = llama(hidden_size=128, intermediate_size=256)
    resolved = resolve_schemes(**fields)
    ours = resolved.schemes_by_module(model)
    config = QuantizationConfig(
        config_groups=dict(resolved.groups), ignore=list(resolved.ignore), format="dense"
    )
    apply_quantization_config(model, config, show_progress=False)
    theirs = {
        name: module.quantization_scheme
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    # What the library does not know for attention with a cache it passes over, as a reader of it.
    known = {
        name: scheme
        for name, scheme in ours.items()
        if isinstance(module := model.get_submodule(name), nn.Linear | nn.Embedding)
        or is_cached_attention_module(module)
    }
    assert known == theirs
    assert list(known) == list(theirs)
    missed = [name for name in ours if name not in known]
    assert all(name.endswith("self_attn") for name in missed)
    assert ("model.layers.1.self_attn" in ours) == ("LlamaAttention" in resolved.targets)


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(64, 4)
        self.mlp.shared_expert_gate = nn.Linear(64, 1)
        self.mlp.router = nn.Module()
        self.mlp.router.layer = nn.Linear(64, 4)
        self.mlp.router_gate = nn.Linear(64, 4)
        self.gate = nn.Module()
        self.gate.wg = nn.Linear(64, 4)
        self.indexer = nn.Module()
        self.indexer.wk = nn.Linear(64, 64)
        self.indexer.weights_proj = nn.Linear(64, 4)
        self.mlp.gate_proj = nn.Linear(64, 64)
        self.mlp.expert = nn.Linear(64, 64)
        self.shared_head = nn.Module()
        self.shared_head.head = nn.Linear(64, 8)
        self.eh_proj = nn.Linear(128, 64)
        self.masked_embedding = nn.Module()
        self.masked_embedding.centroids = nn.Linear(64, 16)
        self.mixer = nn.Module()
        self.mixer.dt_proj = nn.Linear(8, 64)
        self.cross = nn.MultiheadAttention(64, 2)
        self.own = Reading()


class Reading(nn.Module):
    """Uses one weight without calling its module, and calls the others."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called, self.both = (nn.Linear(64, 64) for _ in range(3))
        self.told = nn.Linear(64, 64)
        nn.init.ones_(self.called.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.called(x.to(self.called.weight.dtype)) @ self.read.weight
        return self.both(x) @ self.both.weight


LEFT = "eh_proj masked_embedding.centroids shared_head.head mixer.dt_proj cross.out_proj own.read"
"""Beside routers: of draft layers, and what is used without being called."""


def test_what_servers_build_plain_stays_out_unless_named(log: list[tuple[str, str]]) -> None:
    schemes = resolve_schemes(scheme="FP8").schemes_by_module(Moe())
    assert list(schemes) == [
        *("mlp.gate_proj", "mlp.expert"),
        *("own.called", "own.both", "own.told"),
    ]
    assert {level for level, _ in log} == {"INFO"}
    said = "".join(text for _, text in log)
    assert all(name in said for name in ("mlp.shared_expert_gate", *LEFT.split()))
    named = resolve_schemes(scheme="FP8", targets=["Linear", "re:.*(mlp.gate|indexer.wk)$"])
    assert {"mlp.gate", "indexer.wk"} <= named.schemes_by_module(Moe()).keys()
    named = resolve_schemes(scheme="FP8", targets=["Linear", *LEFT.split()])
    assert set(LEFT.split()) <= named.schemes_by_module(Moe()).keys()


def test_a_tied_head_stays_out_unless_named(log: list[tuple[str, str]]) -> None:
    model = llama(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head" not in resolve_schemes(scheme="FP8").schemes_by_module(model)
    assert log[0][0] == "WARNING"
    assert "tie_word_embeddings=False" in log[0][1]
    named = resolve_schemes(scheme="FP8", targets=["Linear", "lm_head"])
    assert "lm_head" in named.schemes_by_module(model)


def test_narrow_matrices_get_one_group_per_row() -> None:
    model = llama()
    schemes = resolve_schemes(scheme="W4A16", ignore=["lm_head"]).schemes_by_module(model)
    narrow = schemes["model.layers.0.self_attn.q_proj"]
    assert narrow.weights.group_size == 64
    assert schemes["model.layers.0.mlp.down_proj"].weights.group_size == 128
    of_narrow = [name for name, scheme in schemes.items() if scheme.weights.group_size == 64]
    assert narrow.targets == of_narrow
    # The groups written out give every module the same scheme again.
    groups = {str(index): each for index, each in enumerate(set_of(schemes))}
    again = resolve_schemes(config_groups=groups, ignore=["lm_head"]).schemes_by_module(model)
    assert again == schemes


def set_of(schemes: dict[str, QuantizationScheme]) -> list[QuantizationScheme]:
    return list({id(scheme): scheme for scheme in schemes.values()}.values())


def test_targets_that_reach_nothing_quantizable_are_errors(log: list[tuple[str, str]]) -> None:
    model = llama()
    for targets in (["LlamaMLP"], ["re:.*self_attn$"], ["LlamaAttention"]):
        resolved = resolve_schemes(scheme="FP8", targets=targets)
        with pytest.raises(TargetError, match="cannot be applied"):
            resolved.schemes_by_module(model)
        loose = resolve_schemes(scheme="FP8", targets=targets, allow_unmatched=True)
        assert loose.schemes_by_module(model) == {}
    with pytest.raises(TargetError, match="is left to quantize"):
        resolve_schemes(scheme="FP8", ignore=["Linear"]).schemes_by_module(model)
    assert not log


@pytest.mark.parametrize(
    "args",
    [
        {"num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True},
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "dynamic": "local",
        },
    ],
    ids=["group", "tensor_group"],
)
def test_scales_of_groups_of_features_that_are_found_at_run_time(args: dict[str, Any]) -> None:
    groups = {"g": {"targets": ["Linear"], "weights": W4, "input_activations": args}}
    found = resolve_schemes(config_groups=groups).groups["g"].input_activations
    assert found.strategy == args["strategy"]
    assert found.dynamic == args["dynamic"]
