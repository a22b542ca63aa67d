# SPDX-License-Identifier: Apache-2.0
"""What ``modify_save_pretrained`` knows of a model that a script says nothing else of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import small_models as small
from transformers import LlavaConfig, LlavaForConditionalGeneration

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.recipe import Recipe
from llmcompressor.transformers.sparsification import modify_save_pretrained

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def fp8(*targets: str) -> QuantizationModifier:
    return QuantizationModifier(targets=list(targets), scheme="FP8_DYNAMIC")


def two_parts() -> Any:
    text = {**SIZES, "model_type": "llama", "vocab_size": small.VOCABULARY}
    tower = {**SIZES, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=tower, image_token_index=5)
    ).bfloat16()


def recipe_of(folder: Path) -> Recipe:
    return Recipe.create_instance((folder / "recipe.yaml").read_text())


def test_the_recipe_of_a_part_is_that_of_the_whole(tmp_path: Path, warned: list[str]) -> None:
    model = two_parts()
    oneshot(model=model.model.language_model, recipe=fp8("re:.*mlp.*"))
    modify_save_pretrained(model)
    model.save_pretrained(tmp_path / "out")
    assert recipe_of(tmp_path / "out").modifiers[0].targets == ["re:.*mlp.*"]
    report = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    assert report["verification"]["counts"]["error"] == 0
    assert not [line for line in warned if "would not" in line or "not good" in line]


@pytest.mark.parametrize("is_checked", [False, True])
def test_what_a_run_has_left_stays(is_checked: bool, tmp_path: Path) -> None:
    model = small.one_block()
    oneshot(model, fp8("re:.*mlp.*"), verify=is_checked)
    modify_save_pretrained(model)
    model.save_pretrained(tmp_path / "out")
    assert recipe_of(tmp_path / "out").modifiers[0].targets == ["re:.*mlp.*"]
    assert (tmp_path / "out" / "compression_report.json").exists() == is_checked
    modify_save_pretrained(model, recipe="a: 1")
    model.save_pretrained(tmp_path / "other")
    assert (tmp_path / "other" / "recipe.yaml").read_text() == "a: 1"


def test_a_check_that_breaks_off_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[tuple[str, str]]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError("odd")

    model = small.one_block()
    oneshot(model=model, recipe=fp8("Linear"))
    monkeypatch.setattr("llmcompressor.entrypoints.verify.verify_files", broken)
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert [text for level, text in log if level == "ERROR" and "could not be checked" in text]
