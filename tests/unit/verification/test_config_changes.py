# SPDX-License-Identifier: Apache-2.0
"""What of ``config.json`` differs from the original's: by its meaning, and at every level."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint_samples import Sample
from transformers import CONFIG_MAPPING

from llmcompressor import verify
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.verification.transformers_model import config_changes

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
}
LAYERS = ["sliding_attention", "full_attention"]
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "layer_types": LAYERS,
        "sliding_window": 512,
    },
    "vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 4},
}
SETTINGS = [
    (LLAMA, "rope_scaling", {"rope_type": "linear", "factor": 4.0}),
    (LLAMA, "rope_theta", 10000.0),
    (LLAMA, "logit_scale", 0.5),
    (LLAMA, "hidden_act", "gelu"),
    (LLAMA, "model_type", "mistral"),
    (LLAMA, "architectures", ["Qwen3ForCausalLM"]),
    (GEMMA, "text_config.rms_norm_eps", 1e-5),
    (GEMMA, "text_config.hidden_activation", "silu"),
    (GEMMA, "text_config.sliding_window", 1024),
    (GEMMA, "text_config.layer_types", LAYERS[::-1]),
    (GEMMA, "vision_config.num_attention_heads", 8),
    (GEMMA, "vision_config.layer_norm_eps", 1e-5),
    (GEMMA, "image_token_index", 7),
]
TYPES = [
    "bloom",
    "deepseek_v3",
    "falcon",
    "gemma2",
    "gemma3",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granitemoe",
    "llama",
    "llama4",
    "llava",
    "mistral",
    "mistral3",
    "mixtral",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
    "stablelm",
    "t5",
    "whisper",
]


def said(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [one.sentence for one in config_changes(ours, theirs)]


@pytest.mark.parametrize(("theirs", "path", "value"), SETTINGS)
def test_a_setting_that_was_changed_is_named(theirs: dict[str, Any], path: str, value: Any) -> None:
    ours = copy.deepcopy(theirs)
    holder, *parts = ours, *path.split(".")
    for part in parts[:-1]:
        holder = holder[part]
    holder[parts[-1]] = value
    found = said(ours, theirs)
    stem = "rope_parameters" if parts[-1].startswith("rope") else path
    assert found
    assert all(stem in one for one in found)


@pytest.mark.parametrize(
    ("theirs", "path"),
    [(LLAMA, "rope_theta"), (LLAMA, "architectures"), (GEMMA, "text_config.hidden_size")],
)
def test_a_setting_that_was_lost_is_named(theirs: dict[str, Any], path: str) -> None:
    ours = copy.deepcopy(theirs)
    part, _, key = path.rpartition(".")
    del (ours[part] if part else ours)[key]
    assert len(said(ours, theirs)) == 1
    assert "lost" in said(ours, theirs)[0] or "rope_parameters.rope_theta" in said(ours, theirs)[0]


def test_a_part_that_was_lost_is_named_once() -> None:
    ours = {key: value for key, value in GEMMA.items() if key != "text_config"}
    assert said(ours, GEMMA) == ["config.json has lost text_config."]


def test_a_type_that_nobody_knows_is_compared_by_the_files() -> None:
    theirs = {"model_type": "of_somebody", "part": {"size": 4, "is_encoder_decoder": False}}
    assert not said({**theirs, "added": 1}, theirs)
    changed = {**theirs, "part": {"size": 5}}
    assert said(changed, theirs) == ["part.size is 5 in config.json and was 4."]
    assert said({"model_type": "of_somebody"}, theirs) == ["config.json has lost part."]


@pytest.mark.parametrize("model_type", TYPES)
def test_what_transformers_writes_anew_has_not_changed(model_type: str) -> None:
    short = json.loads(CONFIG_MAPPING[model_type]().to_json_string())
    whole = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    again = json.loads(CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(short)).to_json_string())
    for ours, theirs in ((short, whole), (whole, short), (again, short), (short, again)):
        assert not said(ours, theirs)


def test_settings_in_their_old_places_have_not_changed() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    old = {**LLAMA, "rope_scaling": scaling}
    new = json.loads(CONFIG_MAPPING["llama"].from_dict(copy.deepcopy(old)).to_json_string())
    assert "rope_theta" not in new
    assert not said(new, old)
    # in the file of the run they stay where they were
    assert not said({**old, "dtype": "float16", "quantization_config": {"format": "x"}}, old)


def test_the_report_has_them(
    llama_folder: Path, compressed: Callable[..., Path], tmp_path: Path
) -> None:
    source = Sample.read(llama_folder)
    rope = source.config.pop("rope_parameters")
    source.config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    reference = source.write(tmp_path / "source")
    recipe = QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"])
    sample = Sample.read(compressed(reference, recipe))

    def found(name: str) -> list[str]:
        report = verify(sample.write(tmp_path / name), reference, tp=1)
        return [one.message for one in report.findings if one.severity != "note"]

    assert not found("good")
    sample.config["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    assert any("rope_parameters.factor" in message for message in found("scaled"))
    sample.config["architectures"] = ["Qwen3ForCausalLM"]
    assert any(message.startswith("architectures is") for message in found("class"))
