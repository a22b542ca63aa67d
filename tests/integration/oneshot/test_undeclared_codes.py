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


def test_a_teacher_of_codes_is_refused(one_block: Path, codes: Path, tmp_path: Path) -> None:
    recipe = "modifiers: {OutputDistillationModifier: {targets: [lm_head]}}"
    with pytest.raises(CheckpointError, match=SAID):
        train(
            model=str(one_block),
            distill_teacher=str(codes),
            recipe=recipe,
            dataset=small.token_rows(),
            output_dir=str(tmp_path / "out"),
            max_steps=1,
        )


def dequantized(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"{name}_scale" in tensors:
                parameter.mul_(tensors[f"{name}_scale"])
    return model


def test_an_object_that_somebody_has_dequantized_is_taken(codes: Path, tmp_path: Path) -> None:
    quantize(dequantized(codes), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = load_file(codes / "model.safetensors")
    before = stored[name].float() * stored[f"{name}_scale"]
    after = written[name].float() * written[f"{name}_scale"].float()
    assert (after - before).norm() < 0.05 * before.norm()


@pytest.mark.parametrize(
    ("name", "way"), [(SIDE_FILES[0], "oneshot"), (SIDE_FILES[-1], "model_free_ptq")]
)
def test_what_another_method_says_of_the_source_is_not_said_of_the_output(
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
