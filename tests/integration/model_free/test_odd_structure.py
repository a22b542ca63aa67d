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
from llmcompressor.schemes.presets import preset_scheme
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


@pytest.mark.parametrize(
    ("kind", "classes", "left"),
    [
        ("newmodel", ["EagleLlama4ForCausalLM"], ["fc"]),
        ("newmodel", ["MiniCPMForCausalLM"], ["fc"]),
        ("newmodel", ["EagleLlamaForCausalLM"], []),
        ("newmodel", ["Gemma4DSparkModel"], ["confidence_head.proj", "markov_head.markov_w2"]),
    ],
)
def test_what_a_draft_has_plain_stays_so_unless_named(
    kind: str, classes: list[str], left: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "draft"
    source.mkdir()
    config = {"model_type": kind, "architectures": classes, "hidden_size": 32}
    (source / "config.json").write_text(json.dumps(config))
    names = ["layers.0.mlp.up_proj", "fc", "confidence_head.proj", "markov_head.markov_w2"]
    tensors = {f"{name}.weight": torch.randn(32, 32) for name in names}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    joins = [name for name in names if "head" in name]
    for output, scheme, plain in (
        ("plain", "W8A16", {*left, *joins}),
        ("named", {"all": preset_scheme("W8A16", ["Linear", *left])}, {*joins} - {*left}),
    ):
        given = {"scheme": scheme} if output == "plain" else {"config": scheme}
        model_free_ptq(source, tmp_path / output, **given, verify=False)
        stored = load_file(tmp_path / output / "model.safetensors")
        packed = {name.partition(".weight")[0] for name in stored if "packed" in name}
        assert packed == {*names} - plain
        told = {one.module for one in verify_files(tmp_path / output).findings if one.rule == "S20"}
        assert told == {*left} & packed - {"markov_head.markov_w2"}


PLAIN = (
    "layers.3.eh_proj",
    "layers.3.shared_head.head",
    "layers.0.mixer.dt_proj",
    "cross.out_proj",
)


def test_what_servers_build_plain_stays_so_unless_named(whole: Path, tmp_path: Path) -> None:
    """Of draft layers, state-space models and torch's own attention; `verify` tells of each."""
    source = tmp_path / "model"
    shutil.copytree(whole, source)
    tensors = load_file(source / "model.safetensors")
    tensors |= {f"model.{name}.weight": torch.randn(32, 32) for name in PLAIN}
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.randn(32, 32)
    tensors["model.cross.in_proj_weight"] = torch.randn(96, 32)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    settings = json.loads((source / "config.json").read_text()) | UNKNOWN
    (source / "config.json").write_text(json.dumps(settings))

    def quantized(folder: Path) -> set[str]:
        stored = load_file(folder / "model.safetensors")
        return {name.removesuffix(".weight_packed") for name in stored if "packed" in name}

    model_free_ptq(source, tmp_path / "plain", "W8A16", ignore=["lm_head"])
    names = {f"model.{name}" for name in PLAIN}
    found = quantized(tmp_path / "plain")
    assert names.isdisjoint(found)
    assert "model.layers.3.mlp.up_proj" in found
    groups = {"all": preset_scheme("W8A16", ["Linear", *names])}
    model_free_ptq(source, tmp_path / "named", config=groups, verify=False)
    assert names <= quantized(tmp_path / "named")
    told = {(one.rule, one.module) for one in verify_files(tmp_path / "named").findings}
    assert ("S20", "model.layers.3.eh_proj") in told
