# SPDX-License-Identifier: Apache-2.0
"""Models whose folder holds a larger one: what is written of them is a copy of the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open

from llmcompressor import oneshot, verify
from llmcompressor.checkpoint.names import config_levels
from llmcompressor.modifiers.quantization import QuantizationModifier

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGHT: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "patch_size": 4}
IDS = torch.arange(3, 35)[None]


def qwen(folder: Path, *, tied: bool = False) -> Path:
    """Qwen 3.5, whose class for text alone takes the prefix of its tensors off by a table."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    config = hf.Qwen3_5Config(
        text_config={
            **SIZES,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {**rope, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": tied,
        },
        vision_config={**SIGHT, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
        image_token_id=4,
        tie_word_embeddings=tied,
    )
    hf.Qwen3_5ForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    return folder


def llama(folder: Path) -> Path:
    """Llama 4, where transformers takes off the prefix that is common to a class."""
    torch.manual_seed(0)
    config = hf.Llama4Config(
        text_config={
            **SIZES,
            "num_hidden_layers": 1,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 64,
        },
        vision_config={
            **SIGHT,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        image_token_index=4,
    )
    hf.Llama4ForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    return folder


def fp8() -> QuantizationModifier:
    return QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def names_in(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            found |= set(file.keys())
    return found


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


def assert_reads_as(folder: Path, kind: Any, wanted: torch.Tensor) -> None:
    model, info = kind.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    torch.testing.assert_close(logits(model), wanted)


@pytest.mark.parametrize(
    ("made", "part"),
    [(qwen, hf.AutoModelForCausalLM), (llama, hf.Llama4ForCausalLM)],
    ids=["Qwen3.5", "Llama4"],
)
def test_the_text_part_is_written_into_the_larger_model(
    made: Any, part: Any, tmp_path: Path
) -> None:
    source = made(tmp_path / "source")
    whole = getattr(hf, config_of(source)["architectures"][0])
    model = part.from_pretrained(source, dtype=torch.bfloat16)
    model = oneshot(model=model, recipe=fp8(), output_dir=tmp_path / "out")
    model.save_pretrained(tmp_path / "saved")
    for folder in (tmp_path / "out", tmp_path / "saved"):
        own = type(model)
        for kind in (own, part, whole):
            assert_reads_as(folder, kind, logits(model))
        config = config_of(folder)
        assert config.pop("quantization_config") == config["text_config"].pop("quantization_config")
        assert config == config_of(source)
        lost = names_in(source) - names_in(folder)
        assert all(".experts." in name for name in lost)  # which are written one by one
        assert verify(folder, reference=source).ok


def test_a_run_by_path_writes_the_same_weights(tmp_path: Path) -> None:
    source = qwen(tmp_path / "source")
    oneshot(model=str(source), recipe=fp8(), output_dir=tmp_path / "whole")
    model = hf.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    oneshot(model=model, recipe=fp8(), output_dir=tmp_path / "part")
    assert {name for name in names_in(tmp_path / "part") if "visual" not in name} == {
        name for name in names_in(tmp_path / "whole") if "visual" not in name
    }


def test_what_was_changed_of_a_part_stands_in_its_place(tmp_path: Path) -> None:
    source = qwen(tmp_path / "source", tied=True)
    model = hf.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.resize_token_embeddings(112)
    model.config.max_position_embeddings = 256
    model = oneshot(
        model=model, recipe=fp8(), output_dir=tmp_path / "out", tie_word_embeddings=False
    )
    before, after = config_of(source), config_of(tmp_path / "out")
    after.pop("quantization_config")
    after["text_config"].pop("quantization_config")
    changes = {"vocab_size": 112, "max_position_embeddings": 256, "tie_word_embeddings": False}
    assert after["text_config"] == {**before["text_config"], **changes}
    assert after == {**before, "text_config": after["text_config"], "tie_word_embeddings": False}
    for kind in (hf.AutoModelForCausalLM, hf.Qwen3_5ForConditionalGeneration):
        assert_reads_as(tmp_path / "out", kind, logits(model))


def test_a_part_is_found_below_other_parts() -> None:
    text = {"model_type": "qwen2_5_omni_text"}
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": text}
    config = {"model_type": "qwen2_5_omni", "thinker_config": thinker}
    assert config_levels(config, hf.Qwen2_5OmniConfig()) == [config]
    assert config_levels(config, hf.Qwen2_5OmniConfig().thinker_config) == [config, thinker]
    inner = hf.Qwen2_5OmniConfig().thinker_config.text_config
    assert config_levels(config, inner) == [config, thinker, text]
    assert config_levels(config, hf.LlamaConfig()) == [config]
