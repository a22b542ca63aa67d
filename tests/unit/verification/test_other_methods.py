# SPDX-License-Identifier: Apache-2.0
"""Folders that other methods have quantized are named, and get no remedy that would ruin them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoint_samples import Sample, dense, made
from torch import Tensor

from llmcompressor import evaluate, verify
from llmcompressor.errors import CheckpointError
from llmcompressor.verification import Severity

MODULE = "model.layers.0.mlp.up_proj"
GROUPED = {"scales": torch.ones(2, 256), "qweight": torch.zeros(16, 256, dtype=torch.int32)}
GPTQ = {**GROUPED, "g_idx": torch.zeros(128, dtype=torch.int32)}
E4M3 = torch.zeros(256, 128, dtype=torch.float8_e4m3fn)
BYTES = torch.zeros(256, 64, dtype=torch.uint8)
MLX = {
    "weight": torch.zeros(256, 16, dtype=torch.uint32),
    "scales": torch.ones(256, 2),
    "biases": torch.ones(256, 2),
}
OF_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": {"group_0": {}}}
SCALED = {"weight": E4M3, "weight_scale": torch.tensor(1.0), "input_scale": torch.tensor(1.0)}
# settings, tensors of a module, files beside, the method; whether transformers reads it
FOLDERS: dict[str, tuple[Any, dict[str, Tensor], dict[str, bytes], str, bool]] = {
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"weight": E4M3, "weight_scale_inv": torch.ones(2, 1)},
        {},
        "fp8",
        True,
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4}, GPTQ, {}, "gptq", True),
    "awq": ({"quant_method": "awq", "bits": 4}, GROUPED, {}, "awq", True),
    "auto-round": ({"quant_method": "auto-round", "bits": 4}, GPTQ, {}, "auto-round", True),
    "modelopt": (OF_MODELOPT, SCALED, {}, "modelopt", False),
    "modelopt beside": (None, SCALED, {"hf_quant_config.json": b"{}"}, "ModelOpt", False),
    "gptq beside": (None, GPTQ, {}, "GPTQ", False),
    "bitsandbytes": (
        {"load_in_4bit": True, "quant_method": "bitsandbytes"},
        {"weight": BYTES.view(-1, 1), "weight.absmax": torch.ones(256)},
        {},
        "bitsandbytes",
        True,
    ),
    "mlx": ({"group_size": 64, "bits": 4}, MLX, {}, "MLX", False),
    "mlx, as of old": (None, MLX, {}, "MLX", False),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        {"w_blocks": torch.zeros(2, 8, 4, 16, dtype=torch.uint8)},
        {},
        "mxfp4",
        True,
    ),
    "unknown": ({"bits": 4}, {"weight": BYTES}, {}, "a method that it does not name", False),
}


def folder_of(
    settings: Any, tensors: dict[str, Tensor], beside: dict[str, bytes], folder: Path
) -> Path:
    sample = made(dense(), only=lambda name: False)
    sample.drop(f"{MODULE}.")
    sample.tensors |= {f"{MODULE}.{own}": one.clone() for own, one in tensors.items()}
    del sample.config["quantization_config"]
    if settings is not None:
        sample.config["quantization_config"] = settings
    return Sample(sample.config, sample.tensors, beside).write(folder)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_another_method_is_named(name: str, tmp_path: Path) -> None:
    *content, method, is_read = FOLDERS[name]
    folder = folder_of(*content, tmp_path / "folder")
    found = verify(folder, tp=1).findings
    assert {one.rule for one in found} == ({"S1"} if is_read else {"S1", "T1"})
    [note] = [one for one in found if one.rule == "S1"]
    assert note.severity is Severity.NOTE
    assert f"quantized by {method}," in note.message
    assert not any("compressed-tensors" in one.remedy for one in found)
    assert verify(folder, serve="vllm").ok
    assert verify(folder, serve="transformers").ok is is_read
    reference = folder_of(None, {}, {}, tmp_path / "original")
    told = verify(folder, reference, serve="vllm").findings
    assert [one.severity for one in told] == [Severity.NOTE, Severity.WARNING]


def test_files_and_floats_of_another_method_are_checked(tmp_path: Path) -> None:
    settings, tensors, beside, *_ = FOLDERS["gptq"]
    bad = {**tensors, "scales": torch.full((2, 256), torch.nan)}
    folder = folder_of(settings, bad, beside, tmp_path / "folder")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert {one.rule for one in verify(folder).findings} >= {"F3", "V6"}


@pytest.mark.parametrize("config", [True, False])
def test_files_of_other_tools_are_named(tmp_path: Path, *, config: bool) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    if not config:
        with pytest.raises(CheckpointError, match=r"Q4_K_M\.gguf \(of llama\.cpp"):
            verify(tmp_path)
        return
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    [missing] = [one for one in verify(tmp_path).findings if one.rule == "F3"]
    assert "model-Q4_K_M.gguf (of llama.cpp" in missing.message
    assert "compress" not in missing.remedy.lower()


@pytest.mark.parametrize("method", ["compressed_tensors", "Compressed-Tensors", None])
def test_transformers_knows_one_spelling(tmp_path: Path, method: str | None) -> None:
    sample = made(dense(), "FP8_DYNAMIC")
    sample.settings["quant_method"] = method
    folder = sample.write(tmp_path / "folder")
    found = [one for one in verify(folder, serve="transformers").findings if one.rule == "T1"]
    assert [one.severity for one in found] == [Severity.ERROR]
    assert ("refuses" if method is None else "passes over it") in found[0].message
    assert verify(folder, serve="vllm", tp=1).ok is (method is not None)


@pytest.mark.parametrize("method", ["compressed_tensors", "modelopt"])
def test_codes_taken_for_weights_are_not_measured(tmp_path: Path, method: str) -> None:
    sample = made(dense(), "FP8_DYNAMIC")
    sample.settings["quant_method"] = method
    with pytest.raises(CheckpointError, match=f"knows no quant_method '{method}'"):
        evaluate(sample.write(tmp_path / "folder"), dataset=[{"input_ids": [3, 4, 5]}])
