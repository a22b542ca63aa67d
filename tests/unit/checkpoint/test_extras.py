# SPDX-License-Identifier: Apache-2.0
"""What is copied beside the weights, and which tensors are told of that stay behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llmcompressor.checkpoint import load
from llmcompressor.checkpoint.copied_files import copy_side_files, left_behind, side_files

FILES = (
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin",
    "parts/3_Norm/config.json",
    "parts/code.py",
    "onnx/model.onnx",
    "onnx/config.json",
)


def modules(*paths: Any, kind: str = "sentence_transformers.models.Dense") -> str:
    return json.dumps(
        [{"idx": place, "path": path, "type": kind} for place, path in enumerate(paths)]
    )


def filled(folder: Path, text: str) -> Path:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "model.safetensors").write_text("weights")
    (folder / "modules.json").write_text(text)
    return folder


def copied(folder: Path, target: Path) -> set[str]:
    copy_side_files(folder, target)
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert names == {path.relative_to(folder).as_posix() for path in side_files(folder)}
    return names


@pytest.mark.parametrize("kind", ["sentence_transformers.models.Dense", "custom_st.Dense"])
def test_folders_of_modules_are_copied_whole(tmp_path: Path, kind: str) -> None:
    text = modules("", "1_Pooling", "2_Dense/", "parts/3_Norm", "4_Normalize", kind=kind)
    names = copied(filled(tmp_path / "model", text), tmp_path / "out")
    assert names == {"modules.json", "parts/code.py", *FILES[:5]}
    assert (tmp_path / "out" / FILES[3]).read_text() == FILES[3]


def test_links_of_the_hubs_cache_are_followed_within_a_module(tmp_path: Path) -> None:
    folder = filled(tmp_path / "model", modules("1_Pooling"))
    (tmp_path / "blob").write_text("pooling")
    (folder / FILES[0]).unlink()
    (folder / FILES[0]).symlink_to(tmp_path / "blob")
    assert FILES[0] in copied(folder, tmp_path / "out")
    assert (tmp_path / "out" / FILES[0]).read_text() == "pooling"


COPIED = (
    "tokenizer.model.v3",
    "tokenizer.model.v7m1",
    "tokenizer.sp",
    "mel_filters.npz",
    "vocab/words.txt",
    "assets/logo.png",
    "speech_tokenizer/config.json",
    "speech_tokenizer/model.safetensors",
    "bert/config.json",
    "bert/vocab.txt",
    "voices/config.json",
    "voices/model.bin",
    "custom/code.py",
    "configuration.yaml",
)
LEFT = (
    "consolidated.safetensors",
    "custom/",
    "model.gguf",
    "onnx/",
    "original/",
    "other/",
    "pytorch_model.bin",
)
NEITHER = (
    ".gitattributes",
    ".git/config",
    "__pycache__/code.pyc",
    "README.md",
    "all_results.json",
    "checkpoint-5/model.safetensors",
    "checkpoint-5/tokenizer.json",
    "config.json",
    "out.partial/journal",
    "quantize_config.json",
    "runs/events.out.tfevents.1",
    "training_args.bin",
)


def test_all_is_copied_or_told_of(tmp_path: Path) -> None:
    """But for what tells of another model, caches and version control."""
    folder = tmp_path / "model"
    within = ("onnx/config.json", "onnx/model.onnx", "original/tokenizer.model")
    within += ("original/consolidated.00.pth", "other/config.json", "other/code.py")
    within += ("custom/table.pt", "model.safetensors")
    files = [one for one in LEFT if not one.endswith("/")]
    for name in (*COPIED, *files, *NEITHER, *within):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    save_file({"t": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"parts": [{"path": "./voices/"}]}))
    assert copied(folder, tmp_path / "out") == set(COPIED)
    assert left_behind(folder) == list(LEFT)


def test_nothing_of_a_model_in_the_format_of_torch_is_left(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("weights")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "kind", "further"),
    [
        (modules("", "2_Dense"), "bert", ["2_Dense/*"]),
        (modules(""), "bert", None),
        ("[]", "qwen2_5_omni", ["spk_dict.pt"]),
    ],
)
def test_what_is_copied_is_fetched_in_any_format(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    kind: str,
    further: list[str] | None,
) -> None:
    asked: list[tuple[str, Sequence[str]]] = []

    def download(model: str, **given: Any) -> str:
        asked.extend((key, given[key]) for key in given if key.endswith("patterns"))
        return str(tmp_path)

    (tmp_path / "modules.json").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    monkeypatch.setattr(load, "snapshot_download", download)
    assert load.fetch("owner/model") == tmp_path
    assert asked[1:] == ([("allow_patterns", further)] if further else [])
