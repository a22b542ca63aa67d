# SPDX-License-Identifier: Apache-2.0
"""Tensors of the source that the model's class does not read: what is said of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot
from llmcompressor.logger import logger

RTN = "modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head]}}"
INDEXER = "model.layers.0.self_attn.indexer.wk.weight"
SINKS = "model.layers.0.self_attn.sinks"
BIAS = "model.layers.0.mlp.up_proj.bias"
DRAFT = "model.layers.1.eh_proj.weight"
LORA = "model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), level="WARNING", format="{message}")
    yield lines
    logger.remove(sink)


def with_tensors(source: Path, folder: Path, *names: str) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: torch.ones(2, 2) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantized(folder: Path, kind: str, place: Path) -> set[str]:
    model = str(folder) if kind == "folder" else AutoModelForCausalLM.from_pretrained(folder)
    oneshot(model=model, recipe=RTN, output_dir=str(place), verify=False)
    return {name for file in place.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize("kind", ["folder", "object"])
def test_what_stays_behind_is_named_once(
    one_block: Path, tmp_path: Path, said: list[str], kind: str
) -> None:
    cache = "model.layers.0.self_attn.rotary_emb.inv_freq"
    names = (INDEXER, SINKS, BIAS, DRAFT, cache, "mtp.fc.weight")
    folder = with_tensors(one_block, tmp_path / "model", *names)
    written = quantized(folder, kind, tmp_path / "out")
    assert {DRAFT, "mtp.fc.weight"} == written & {*names}
    (line,) = [one for one in said if "Left out" in one]
    assert all(name in line for name in (INDEXER, SINKS, BIAS, "model_free_ptq"))
    assert not any(name in line for name in (DRAFT, cache, "mtp"))


def test_an_adapter_among_the_weights_is_told_of(
    one_block: Path, tmp_path: Path, said: list[str]
) -> None:
    folder = with_tensors(one_block, tmp_path / "model", LORA, LORA.replace("_A", "_B"))
    quantized(folder, "folder", tmp_path / "out")
    (line,) = [one for one in said if "adapter" in one]
    assert LORA in line
    assert "merge it into the weights" in line
    assert not [one for one in said if "Left out" in one]
