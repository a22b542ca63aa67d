# SPDX-License-Identifier: Apache-2.0
"""Targets and what is ignored are looked for among the modules of the class, however stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from llmcompressor import oneshot, reset_session, verify
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.verification.module_classes import modules_by_class

TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": [32, 32],
    "patch_size": [16, 16],
    "attention_bias": True,
}
TEXT = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
STORED = "vision_model.encoder.layers.0.attn.qkv"
OWN = [f"model.vision_tower.layers.0.attention.{name}_proj" for name in "qkv"]


def split_on_load(**more: Any) -> PreTrainedModel:
    """Its tower's queries, keys and values are one tensor in a file, and three modules here."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qianfan_ocr", vision_config=TOWER, text_config=TEXT, **more)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head", *OWN])
    reset_session()
    oneshot(model=split_on_load(), recipe=recipe, output_dir=str(folder))
    reset_session()
    return folder


def ignoring(folder: Path, ignore: list[str]) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ignore
    (folder / "config.json").write_text(json.dumps(config))


def errors(folder: Path, server: str) -> set[tuple[str, str]]:
    found = verify(folder, serve=server).findings
    return {(one.rule, one.module) for one in found if one.severity == "error"}


def missing(folder: Path) -> set[str]:
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    return set(info["missing_keys"])


def test_transformers_ignores_what_its_class_calls_so(written: Path) -> None:
    assert not errors(written, "transformers")
    assert not errors(written, "vllm")

    ignoring(written, ["lm_head", *OWN])
    assert not missing(written)
    assert not errors(written, "transformers")
    # vLLM knows the name in the file
    assert errors(written, "vllm") == {("S19", STORED)}

    ignoring(written, ["lm_head", STORED])
    assert missing(written)
    assert errors(written, "transformers") == {("T4", STORED)}
    assert not errors(written, "vllm")

    ignoring(written, ["lm_head", STORED, *OWN[:2]])
    assert {name.rpartition(".")[0] for name in missing(written)} == {OWN[2]}
    assert errors(written, "transformers") == {("T4", STORED)}


def test_the_class_tells_all_that_a_tensor_becomes(written: Path) -> None:
    modules = modules_by_class(json.loads((written / "config.json").read_text()))
    assert modules is not None
    assert modules(STORED) == tuple((name, "linear") for name in OWN)
    assert modules("lm_head") == (("lm_head", "linear"),)
    assert modules("nobody.knows") == ()
    assert modules_by_class({"model_type": "nobody_knows", "architectures": ["Nobody"]}) is None


def test_parts_of_a_tensor_are_no_twins_of_it(tmp_path: Path) -> None:
    """The first of them has the name in the class that transformers gives the whole of it."""
    model = split_on_load(tie_word_embeddings=True)
    assert model.all_tied_weights_keys
    model.save_pretrained(tmp_path / "model")
    recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
    reset_session()
    oneshot(model=str(tmp_path / "model"), recipe=recipe, output_dir=str(tmp_path / "out"))
    reset_session()
    found = verify(tmp_path / "out", tmp_path / "model").findings
    assert not [one for one in found if one.rule.startswith("R")]
