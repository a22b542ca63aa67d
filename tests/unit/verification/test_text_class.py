# SPDX-License-Identifier: Apache-2.0
"""What the class of a larger model's text alone makes of a checkpoint is looked at too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from llmcompressor import model_free_ptq, verify

PLAIN = "model.language_model.layers.0.linear_attn.out_proj"
CODED = "model.language_model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 3.5 in which one Linear of the text is plain."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    config = hf.Qwen3_5Config(
        text_config={
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {**rope, "partial_rotary_factor": 0.25},
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "patch_size": 4,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
        image_token_id=4,
    )
    folder = tmp_path_factory.mktemp("text_class")
    hf.Qwen3_5ForConditionalGeneration(config).bfloat16().save_pretrained(folder / "source")
    ignore = ["re:.*lm_head", "re:.*visual.*", PLAIN]
    model_free_ptq(folder / "source", folder / "out", scheme="FP8_DYNAMIC", ignore=ignore)
    return folder / "out"


def spoilt(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def missing(folder: Path) -> set[str]:
    kind = hf.AutoModelForCausalLM
    _, info = kind.from_pretrained(folder, output_loading_info=True)
    return set(info["missing_keys"])


@pytest.fixture
def checkpoint(written: Path) -> Any:
    before = (written / "config.json").read_text()
    yield written
    (written / "config.json").write_text(before)


def test_a_checkpoint_that_both_classes_take_is_good(checkpoint: Path) -> None:
    assert verify(checkpoint).ok
    assert not missing(checkpoint)


def test_what_only_one_of_the_classes_ignores_is_told(checkpoint: Path) -> None:
    own = PLAIN.replace(".language_model", "")
    spoilt(checkpoint, lambda settings: settings["ignore"].remove(own))
    assert missing(checkpoint) == {f"{own}.weight_scale"}
    errors = [one for one in verify(checkpoint).findings if one.severity == "error"]
    assert [(one.rule, one.module) for one in errors] == [("T4", PLAIN)]
    assert "AutoModelForCausalLM" in errors[0].message
    spoilt(checkpoint, lambda settings: settings["ignore"].append(own))  # as the remedy has it
    assert errors[0].remedy == f"Add {own} to ignore."
    assert verify(checkpoint).ok


def test_what_only_one_of_the_classes_finds_a_target_for_is_told(checkpoint: Path) -> None:
    own = CODED.replace(".language_model", "")
    spoilt(checkpoint, lambda settings: settings["ignore"].append(own))
    errors = [one for one in verify(checkpoint).findings if one.server == "transformers"]
    assert [(one.rule, one.module) for one in errors] == [("T5", CODED)]
    assert own in errors[0].remedy
