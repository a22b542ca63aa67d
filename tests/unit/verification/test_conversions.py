# SPDX-License-Identifier: Apache-2.0
"""Which mixtures transformers stacks where a model is quantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Ernie4_5_VLMoeConfig,
    Ernie4_5_VLMoeForConditionalGeneration,
    PreTrainedModel,
)

from llmcompressor import oneshot, reset_session, verify
from llmcompressor.modifiers.quantization import QuantizationModifier


def two_mixtures_of_one_list() -> Ernie4_5_VLMoeForConditionalGeneration:
    """Text and images have experts of their own, which a file numbers on."""
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    text = {
        **sizes,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": [32, 32],
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": rope,
        "vocab_size": 128,
    }
    vision = {**sizes, "depth": 1, "num_heads": 4, "patch_size": 16}
    torch.manual_seed(0)
    config = Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision)
    return Ernie4_5_VLMoeForConditionalGeneration(config).bfloat16()


def test_a_table_that_insists_on_all_that_is_listed_is_told(
    tmp_path: Path, warned: list[str]
) -> None:
    ignore = ["lm_head", "re:.*(vision_tower|resampler|experts).*"]
    recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=ignore)
    oneshot(two_mixtures_of_one_list(), recipe, output_dir=tmp_path / "out")
    said = [line for line in warned if "transformers" in line and "(T6)" in line]
    assert len(said) == 1
    assert "model.layers.1.mlp.experts" in said[0]
    assert "cannot be made of what is stored" in said[0]
    found = verify(tmp_path / "out", serve="transformers").findings
    assert [one.severity for one in found if one.rule == "T6"] == ["error"]
    with pytest.raises(RuntimeError, match="CONVERSION"):  # as the rule says
        Ernie4_5_VLMoeForConditionalGeneration.from_pretrained(tmp_path / "out")


def with_joined_convolutions() -> PreTrainedModel:
    """Its files hold three convolutions where the model has one."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config = AutoConfig.for_model(
        "olmo_hybrid",
        **sizes,
        **heads,
        **linear,
        layer_types=["linear_attention", "full_attention"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def assert_l10_says_what_is_read(folder: Path, kind: str) -> None:
    found = verify(folder, serve="transformers").findings
    said = {(one.rule, one.module) for one in found if one.severity == "error"}
    try:
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    except RuntimeError:
        is_read = False
    else:
        is_read = not info["missing_keys"]
    owner = "model.layers.0.linear_attn"
    assert said == (set() if is_read else {("L10", f"{owner}.{own}_conv1d") for own in "qkv"})
    assert is_read or kind == "int"


@pytest.mark.parametrize(("bits", "kind"), [(4, "int"), (8, "float")])
def test_what_is_joined_where_anything_is_quantized(bits: int, kind: str, tmp_path: Path) -> None:
    """Some releases look for codes of all that becomes a part of another weight."""
    weights = {"num_bits": bits, "type": kind, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights}
    recipe = QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])
    reset_session()
    oneshot(with_joined_convolutions(), recipe, output_dir=tmp_path / "out")
    reset_session()
    assert_l10_says_what_is_read(tmp_path / "out", kind)
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    if config["quantization_config"]["config_groups"].pop("dense_weights", None):
        file.write_text(json.dumps(config))
        assert_l10_says_what_is_read(tmp_path / "out", kind)
