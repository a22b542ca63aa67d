# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llmcompressor.checkpoint.source import inspect_source, is_hub_id, local_directory, read_header
from llmcompressor.errors import CheckpointError


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "llama-small"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    tensors = {"a.weight": torch.zeros(4, 3, dtype=torch.bfloat16), "b": torch.ones(5)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in (1, 2):
        save_file({f"t{number}": torch.zeros(2)}, folder / f"model-{number}.safetensors")
    weight_map = {f"t{number}": f"model-{number}.safetensors" for number in (1, 2)}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_headers(single: Path) -> None:
    info = inspect_source(single)
    assert info.tensors["a.weight"].dtype == "BF16"
    assert info.tensors["a.weight"].shape == (4, 3)
    assert info.size == (single / "model.safetensors").stat().st_size
    assert info.config["model_type"] == "llama"


def test_shards(sharded: Path) -> None:
    info = inspect_source(sharded)
    assert {name: header.file.name for name, header in info.tensors.items()} == {
        "t1": "model-1.safetensors",
        "t2": "model-2.safetensors",
    }


@pytest.mark.parametrize("is_named", [True, False])
def test_an_index_beside_the_one_file_names_what_else_there_is(
    is_named: bool, single: Path
) -> None:
    """Draft layers have a file of their own; an index of other shards means nothing."""
    save_file({"draft": torch.zeros(2), "b": torch.zeros(5)}, single / "model_mtp.safetensors")
    weight_map = {"draft": "model_mtp.safetensors"}
    if is_named:
        weight_map |= dict.fromkeys(("a.weight", "b"), "model.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (single / "model.safetensors.index.json").write_text(json.dumps(index))
    found = {name: one.file.name for name, one in inspect_source(single).tensors.items()}
    own = dict.fromkeys(("a.weight", "b"), "model.safetensors")
    assert found == own | ({"draft": "model_mtp.safetensors"} if is_named else {})


def test_absent_folder_suggests_a_sibling(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist.*Did you mean llama-small\?"):
        inspect_source(single.parent / "lama-small")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"an adapter \(PEFT\) and no model.*merge_and_unload"
    ):
        inspect_source(tmp_path)


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        inspect_source(single)


WEIGHTS = [
    (["weights.safetensors"], "1 weight file (weights.safetensors)", "Rename weights.safetens"),
    (
        [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)],
        "4 weight files (model-00001-of-00004.safetensors, model-00002-of-00004.safetensors, "
        "model-00003-of-00004.safetensors …)",
        "Download or copy model.safetensors.index.json",
    ),
    (
        ["model-00002-of-00004.safetensors"],
        "1 weight file (",
        "Download or copy model.safetensors.index.json",
    ),
    (
        ["pytorch_model-00001-of-00002.bin"],
        "1 weight file (",
        "Download or copy pytorch_model.bin.index.json",
    ),
    (["a.safetensors", "b.safetensors"], "2 weight files (", "save_pretrained"),
    (["model-Q4.gguf"], "1 weight file (model-Q4.gguf)", "save_pretrained"),
]


def test_weights_that_no_loader_finds_are_listed(single: Path) -> None:
    held = (single / "model.safetensors").read_bytes()
    (single / "model.safetensors").unlink()
    (single / "training_args.bin").touch()
    for names, there, remedy in WEIGHTS:
        for name in names:
            (single / name).write_bytes(held)
        with pytest.raises(CheckpointError) as caught:
            inspect_source(single)
        assert f"holds a config.json and {there}" in str(caught.value)
        assert "neither model.safetensors nor model.safetensors.index.json" in str(caught.value)
        assert remedy in caught.value.remedy
        assert ("Rename" in caught.value.remedy) == (remedy.startswith("Rename"))
        for name in names:
            (single / name).unlink()


def test_bytes_of_no_tensor(single: Path) -> None:
    """What safetensors itself refuses, and so every other loader."""
    file = single / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0" * 3)
    with pytest.raises(CheckpointError, match=r"has 3 bytes behind its last tensor"):
        inspect_source(single)
    with pytest.raises(SafetensorError):
        load_file(file)
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    last = max(header["a.weight"], header["b"], key=lambda entry: entry["data_offsets"])
    for by, said in ((4, "has 4 bytes that belong to no tensor"), (-4, "that two tensors share")):
        moved = json.loads(json.dumps(header))
        name = "b" if header["b"] is last else "a.weight"
        moved[name]["data_offsets"] = [place + by for place in last["data_offsets"]]
        text = json.dumps(moved).encode()
        data = whole[8 + length :] + b"\0" * max(by, 0)
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        with pytest.raises(CheckpointError, match=said):
            inspect_source(single)
        with pytest.raises(SafetensorError):
            load_file(file)


def test_truncated_shard_is_named(sharded: Path) -> None:
    file = sharded / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is truncated"):
        inspect_source(sharded)


DAMAGED = [
    (b"", "no safetensors file"),
    (b"\x00" * 64, "no safetensors file"),
    (b"PK\x03\x04" + b"\xff" * 64, "no safetensors file"),
    (struct.pack("<Q", 8) + b"no json!", "header of"),
    (struct.pack("<Q", 8) + b'{"a": 1}', "header of"),
    (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
]


def test_damaged(single: Path) -> None:
    for content, reason in DAMAGED:
        (single / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=reason):
            read_header(single / "model.safetensors")


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 weight files: model-1\.safetensors"):
        inspect_source(sharded)


def test_index_that_does_not_fit(sharded: Path) -> None:
    save_file({"other": torch.zeros(2)}, sharded / "model-1.safetensors")
    with pytest.raises(CheckpointError, match="places the tensor t1"):
        inspect_source(sharded)


def test_quantized_models_are_refused_with_a_remedy(single: Path) -> None:
    settings = {"quantization_config": {"quant_method": "gptq"}}
    other = {"compression_config": {"quant_method": "gptq"}}
    for config in (settings, {"text_config": settings}, other):
        (single / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="already quantized by gptq"):
            inspect_source(single)
        assert inspect_source(single, allow_quantized=True).tensors
    for method, remedy in (("compressed-tensors", "load_context"), ("fp8", "dequantize=True")):
        config = {"quantization_config": {"quant_method": method}}
        (single / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=remedy):
            inspect_source(single)


def test_hub_ids(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_id("owner/name.v1")
    assert not is_hub_id("owner/name/more")
    assert not is_hub_id(Path("owner/name"))
    monkeypatch.chdir(single.parent)
    assert not is_hub_id("llama-small")
    assert local_directory("llama-small") == single
    assert local_directory("no-such-owner/no-such-model") is None
