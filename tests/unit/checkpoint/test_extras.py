# SPDX-License-Identifier: Apache-2.0
"""What is copied beside the weights, and which tensors are told of that stay behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmcompressor.checkpoint import load
from llmcompressor.checkpoint.side_files import copy_side_files, side_files

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


def modules(*paths: Any) -> str:
    kind = "sentence_transformers.models.Dense"
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


def test_folders_of_modules_are_copied_whole(tmp_path: Path) -> None:
    text = modules("", "1_Pooling", "2_Dense/", "parts/3_Norm", "4_Normalize")
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
