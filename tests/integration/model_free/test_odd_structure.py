# SPDX-License-Identifier: Apache-2.0
"""Originals that lack, or size otherwise, what their class, their layers or their settings say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import small_models
from torch import Tensor

from llmcompressor import model_free_ptq
from llmcompressor.verification import Severity, verify_files

UNKNOWN = {"model_type": "newmodel", "architectures": ["NewModelForCausalLM"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "whole"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    small_models.llama(**sizes, num_hidden_layers=3).save_pretrained(folder)
    return folder


def lacks_a_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.post_attention_layernorm.weight"]


def norms_in_other_layers(tensors: dict[str, Tensor]) -> None:
    for layer in (0, 2):
        tensors[f"model.layers.{layer}.self_attn.q_norm.weight"] = torch.ones(8)


def lacks_a_layer(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".layers.2." in name]:
        del tensors[name]


def has_a_padded_vocabulary(tensors: dict[str, Tensor]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name][:8]])


def has_a_wider_layer(tensors: dict[str, Tensor]) -> None:
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"] = torch.randn(48, 32)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.randn(32, 48)


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (lacks_a_norm, {}),
        (lacks_a_norm, UNKNOWN),
        (norms_in_other_layers, UNKNOWN),
        (lacks_a_layer, UNKNOWN),
        (has_a_padded_vocabulary, {}),
        (has_a_wider_layer, {}),
    ],
)
def test_what_the_original_lacks_too_is_no_fault(
    change: Callable[[dict[str, Tensor]], None],
    config: dict[str, Any],
    whole: Path,
    tmp_path: Path,
) -> None:
    source, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(whole, source)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    settings = json.loads((source / "config.json").read_text()) | config
    (source / "config.json").write_text(json.dumps(settings))
    model_free_ptq(source, output, "W8A16", ignore=["lm_head"])
    report = verify_files(output, source)
    assert report.ok
    notes = [one for one in report.findings if one.rule in ("S70", "C2")]
    assert {one.severity for one in notes} == {Severity.NOTE}
    assert not verify_files(output).ok
    lost = load_file(output / "model.safetensors")
    del lost["model.layers.0.input_layernorm.weight"]
    save_file(lost, output / "model.safetensors", {"format": "pt"})
    assert not verify_files(output, source).ok
