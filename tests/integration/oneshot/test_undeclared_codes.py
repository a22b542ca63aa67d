# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose weights are quantized, and whose config.json says nothing of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import small_models as small
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmcompressor import evaluate, model_free_ptq, oneshot, plan, train
from llmcompressor.checkpoint.source import SIDE_FILES
from llmcompressor.errors import CheckpointError

RTN = "modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head]}}"
SAID = r"proj\.weight .*quantized already, though config\.json does not say so"


@pytest.fixture
def codes(one_block: Path, tmp_path: Path) -> Path:
    """Float8 with one scale per weight, as ModelOpt writes it."""
    folder = tmp_path / "codes"
    shutil.copytree(one_block, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        scale = tensors[name].float().abs().max() / 448
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantize(model: Any, place: Path) -> Any:
    return oneshot(model=model, recipe=RTN, output_dir=str(place), verify=False)


ENTRYPOINTS: dict[str, Callable[[Any, Path], Any]] = {
    "oneshot": quantize,
    "in memory": lambda model, place: oneshot(model=model, recipe=RTN),
    "plan": lambda model, place: plan(model, recipe=RTN),
    "train": lambda model, place: train(
        model=model, dataset=small.token_rows(), output_dir=str(place), max_steps=1
    ),
    "evaluate": lambda model, place: evaluate(model, dataset=small.token_rows()),
}


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
@pytest.mark.parametrize("kind", ["folder", "object"])
def test_codes_are_not_taken_for_weights(
    codes: Path, tmp_path: Path, entrypoint: str, kind: str
) -> None:
    model = str(codes) if kind == "folder" else AutoModelForCausalLM.from_pretrained(codes)
    with pytest.raises(CheckpointError, match=SAID):
        ENTRYPOINTS[entrypoint](model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def dequantized(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"{name}_scale" in tensors:
                parameter.mul_(tensors[f"{name}_scale"])
    return model


@pytest.mark.parametrize(
    ("name", "way"), [(SIDE_FILES[0], "oneshot"), (SIDE_FILES[-1], "model_free_ptq")]
)
def test_another_method_s_word_of_the_source_is_not_carried_on(
    one_block: Path, tmp_path: Path, name: str, way: str
) -> None:
    folder, place = tmp_path / "model", tmp_path / "out"
    shutil.copytree(one_block, folder)
    (folder / name).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    (folder / "kept.json").write_text("{}")
    if way == "oneshot":
        quantize(str(folder), place)
    else:
        model_free_ptq(folder, place, "FP8_DYNAMIC", ignore=["lm_head"])
    assert (place / "kept.json").is_file()
    assert not (place / name).exists()
