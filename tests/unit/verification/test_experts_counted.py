# SPDX-License-Identifier: Apache-2.0
"""How many experts a list must hold: its class knows where mixtures share one, or some are bare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from transformers import AutoConfig

from llmcompressor.verification import Deployment, TensorInfo, check_serving
from llmcompressor.verification.transformers_model import module_classes

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
EXPERTS = "model.layers.0.mlp.experts"
OWN = ("gate_proj", "up_proj", "down_proj")


def two_in_one_list() -> dict[str, Any]:
    """Four experts for text and four for images."""
    text = {
        **SIZES,
        "model_type": "ernie4_5_vl_moe_text",
        "mlp_layer_types": ["sparse"],
        "moe_intermediate_size": [32, 32],
        "moe_num_experts": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [3, 3, 2],
        },
    }
    tower = {"depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64}
    config = AutoConfig.for_model("ernie4_5_vl_moe", text_config=text, vision_config=tower)
    return {**config.to_dict(), "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"]}


def with_a_bare_one() -> dict[str, Any]:
    """Four experts and one that passes on what it gets, with rows in one of the stacks."""
    ranks = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}
    more = {"num_layers": 1, "n_routed_experts": 4, "zero_expert_num": 1, "moe_topk": 2}
    config = AutoConfig.for_model(
        "longcat_flash", **{**SIZES, "num_hidden_layers": 2}, **ranks, **more, ffn_hidden_size=64
    )
    return {**config.to_dict(), "architectures": ["LongcatFlashForCausalLM"]}


def nobody() -> dict[str, Any]:
    return {**SIZES, "model_type": "nobody_knows", "num_experts": 4}


def said(config: dict[str, Any], tensors: Iterable[str]) -> set[str]:
    headers = {f"{EXPERTS}.{name}.weight": TensorInfo("BF16", (64, 64)) for name in tensors}
    found = check_serving(config, headers, deployment=Deployment("vllm"))
    return {one.module for one in found if one.rule == "S68"}


def whole(*numbers: int) -> set[str]:
    return {f"{number}.{own}" for number in numbers for own in OWN}


@pytest.mark.parametrize(
    "config", [two_in_one_list(), with_a_bare_one(), nobody()], ids=["shared", "bare", "unknown"]
)
def test_a_whole_list_is_good(config: dict[str, Any]) -> None:
    number = 8 if "text_config" in config else 4
    assert not said(config, whole(*range(number)))
    assert said(config, whole(*range(number + 2))) == {EXPERTS}
    assert said(config, whole(*range(number - 1))) == {EXPERTS}
    assert said(config, whole(*range(number)) - whole(1)) == {EXPERTS}
    assert said(config, whole(*range(number)) - {"1.up_proj"}) == {f"{EXPERTS}.1"}


def test_a_bare_expert_has_what_the_class_stacks_of_it() -> None:
    config = with_a_bare_one()
    assert not said(config, {*whole(0, 1, 2, 3), "4.gate_proj", "4.up_proj"})
    assert said(config, {*whole(0, 1, 3), "4.gate_proj", "4.up_proj"}) == {EXPERTS}


@pytest.mark.parametrize("rows", [32, 96])
@pytest.mark.parametrize("own", OWN)
def test_a_matrix_that_is_not_as_large_as_the_others_is_found(own: str, rows: int) -> None:
    """Each of its tensors may fit the others: it is copied into a part of its place."""
    headers = {
        f"{EXPERTS}.{name}.weight": TensorInfo("BF16", (64, 64)) for name in whole(*range(4))
    }
    odd = f"{EXPERTS}.2.{own}"
    headers[f"{odd}.weight"] = TensorInfo("BF16", (rows, 64))
    found = check_serving(alone(), headers, deployment=Deployment("vllm"))
    assert {one.module for one in found if one.rule == "S68"} == {odd}


def test_experts_of_two_sizes_in_one_list_are_no_fault() -> None:
    headers = {
        f"{EXPERTS}.{number}.{own}.weight": TensorInfo("BF16", (32 if number > 3 else 64, 64))
        for number in range(8)
        for own in OWN
    }
    found = check_serving(two_in_one_list(), headers, deployment=Deployment("vllm"))
    assert not [one for one in found if one.rule == "S68"]


def alone() -> dict[str, Any]:
    config = AutoConfig.for_model("qwen3_moe", **SIZES, num_experts=4, moe_intermediate_size=64)
    return {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "number", "is_taken"),
    [(two_in_one_list(), 8, False), (with_a_bare_one(), 4, True), (alone(), 4, True)],
    ids=["shared", "bare", "alone"],
)
def test_plain_experts_of_a_shared_list_are_not_loaded(
    config: dict[str, Any], number: int, is_taken: bool
) -> None:
    """What splits the list of two mixtures insists on all that it looks for, and so on scales."""
    floats = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": floats}},
        "ignore": ["re:.*experts.*"],
    }
    names = whole(*range(number))
    headers = {f"{EXPERTS}.{name}.weight": TensorInfo("BF16", (64, 64)) for name in names}
    found = check_serving(config, headers, deployment=Deployment("transformers"))
    said = [one.module for one in found if one.rule == "T6"]
    assert said == ([] if is_taken else [EXPERTS])


def stacked(config: dict[str, Any], path: str) -> int | None:
    classes = module_classes(config)
    return None if classes is None else classes.experts(path)


def test_the_class_tells_how_many_it_stacks() -> None:
    path = f"{EXPERTS}.0"
    assert stacked(two_in_one_list(), f"{path}.up_proj") == 8
    assert stacked(with_a_bare_one(), f"{path}.up_proj") == 5
    assert stacked(with_a_bare_one(), f"{path}.down_proj") == 4
    assert stacked(nobody(), f"{path}.up_proj") is None
