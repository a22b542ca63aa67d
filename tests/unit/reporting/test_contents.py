# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, by its headers, against what is in its files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from llmcompressor.errors import CheckpointError
from llmcompressor.reporting.contents import contents_of, kind_of


def test_kinds_hold_every_byte_once(pico: Path) -> None:
    found = contents_of(pico)
    with safe_open(pico / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.bytes == sum(one.nbytes for one in tensors.values())
    assert found.file_bytes == (pico / "model.safetensors").stat().st_size > found.bytes
    modules = [name for kind in found.kinds.values() for name in kind.modules]
    assert len(modules) == len(set(modules))
    assert all(kind_of(name) == kind.name for kind in found.kinds.values() for name in kind.modules)
    down = found.kinds["model.layers.*.mlp.down_proj"]
    assert len(down.modules) == 4
    assert not found.matrices


@pytest.mark.parametrize("damage", ["cut", "empty", "no weights", "no config", "shard"])
def test_half_a_checkpoint_is_one_error(pico: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(pico, folder)
    weights = folder / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "no weights":
        weights.unlink()
    elif damage == "no config":
        (folder / "config.json").unlink()
    else:
        weights.rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-2.safetensors"}}'
        )
    file = {"no config": r"config\.json", "no weights": r"model\.safetensors", "shard": r"model-.*"}
    named = rf"no whole checkpoint: {file.get(damage, r'model.safetensors')}: "
    with pytest.raises(CheckpointError, match=named) as caught:
        contents_of(folder)
    assert "llmcompressor verify" in str(caught.value)


def test_a_folder_without_a_model_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no model"):
        contents_of(tmp_path)
    with pytest.raises(CheckpointError, match="There is no checkpoint folder"):
        contents_of(tmp_path / "absent")


@pytest.mark.parametrize("text", ["no JSON", "[1]", "[" * 100_000, ""])
def test_a_damaged_report_is_left_out_and_told_of(
    pico: Path, tmp_path: Path, text: str, log: list[tuple[str, str]]
) -> None:
    folder = shutil.copytree(pico, tmp_path / "model")
    contents_of(folder)
    assert not log
    (folder / "compression_report.json").write_text(text)
    assert contents_of(folder).report == {}
    assert "compression_report.json is damaged" in log[0][1]
