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
from llmcompressor.verification import Deployment, TensorInfo, check_serving

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


def test_a_table_with_a_row_for_each_token_is_no_linear() -> None:
    """In code that comes with a model an embedding has any name, and no class can be asked."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    config = {
        "model_type": "unknown_code",
        "vocab_size": 96,
        "hidden_size": 64,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
            "ignore": [],
        },
    }
    headers = {
        "emb.weight": TensorInfo("BF16", (96, 64)),
        "up.weight": TensorInfo("BF16", (64, 64)),
    }
    headers["layers.0.up.weight"] = TensorInfo("BF16", (96, 64))
    headers["mtp.fc.weight"] = TensorInfo("BF16", (96, 128))
    found = check_serving(config, headers, deployment=Deployment("vllm"))
    told = {one.module for one in found if one.rule == "S19"}
    assert told == {"up", "layers.0.up", "mtp.fc"}


def missing(folder: Path) -> set[str]:
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    return set(info["missing_keys"])


def said_and_missing(folder: Path) -> tuple[set[tuple[str, str]], set[str] | None]:
    """Errors for transformers, and which modules miss something there; ``None``: nothing is read.

    Some releases read nothing of a class that splits a weight, once anything is quantized, unless
    all parts are modules with codes. That is an error (L10) then, and else it is none.
    """
    said, unread = errors(folder, "transformers"), ("L10", STORED)
    if unread in said:
        with pytest.raises(ValueError, match="one to many"):
            missing(folder)
        return said - {unread}, None
    return said, {name.rpartition(".")[0] for name in missing(folder)}


def test_transformers_ignores_what_its_class_calls_so(written: Path) -> None:
    said, missed = said_and_missing(written)
    assert not said
    assert not missed
    assert not errors(written, "vllm")

    ignoring(written, ["lm_head", *OWN])
    said, missed = said_and_missing(written)
    assert not said
    assert not missed
    # vLLM knows the name in the file
    assert errors(written, "vllm") == {("S19", STORED)}

    ignoring(written, ["lm_head", STORED])
    said, missed = said_and_missing(written)
    assert said == {("T4", STORED)}
    assert missed is None or missed
    assert not errors(written, "vllm")

    ignoring(written, ["lm_head", STORED, *OWN[:2]])
    said, missed = said_and_missing(written)
    assert said == (set() if missed is None else {("T4", STORED)})
    assert missed is None or missed == {OWN[2]}


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


FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def quantized(targets: list[str], args: dict[str, Any]) -> dict[str, Any]:
    inputs = {**FLOATS, "strategy": "token", "dynamic": True}
    group = {"targets": targets, "weights": args, "input_activations": inputs}
    settings = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    return {"model_type": "nobody_knows", "quantization_config": settings}


def said(names: dict[str, str], targets: list[str]) -> set[tuple[str, str]]:
    """Errors of both servers for modules of 128 x 128: name → dtype of the weight."""
    config, headers = quantized(targets, FLOATS), {}
    for name, dtype in names.items():
        headers[f"{name}.weight"] = TensorInfo(dtype, (128, 128))
        if dtype == "F8_E4M3":
            headers[f"{name}.weight_scale"] = TensorInfo("BF16", (128, 1))
    found = [
        one
        for server in ("vllm", "transformers")
        for one in check_serving(config, headers, deployment=Deployment(server, tp=(1,)))
    ]
    return {(one.rule, one.module) for one in found if one.severity == "error"}


@pytest.mark.parametrize("names", [("w1", "w2", "w3"), ("gate_proj", "up_proj", "down_proj")])
def test_experts_of_an_unknown_family_keep_their_names(
    names: tuple[str, ...],
) -> None:
    paths = [f"layers.0.ffn.experts.{index}.{name}" for index in range(2) for name in names]
    assert not said(dict.fromkeys(paths, "F8_E4M3"), paths)
    assert ("S19", paths[0]) in said(dict.fromkeys(paths, "F8_E4M3"), ["nothing"])
