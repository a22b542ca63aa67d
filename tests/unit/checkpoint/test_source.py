# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from llmcompressor.checkpoint.source import (
    check_patterns,
    inspect_source,
    is_hub_id,
    local_directory,
    read_header,
)
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
    """Draft layers have a file of their own, which is read if the index means another model too."""
    save_file({"draft": torch.zeros(2), "b": torch.zeros(5)}, single / "model_mtp.safetensors")
    weight_map = {"draft": "model_mtp.safetensors"}
    if is_named:
        weight_map |= dict.fromkeys(("a.weight", "b"), "model.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (single / "model.safetensors.index.json").write_text(json.dumps(index))
    found = {name: one.file.name for name, one in inspect_source(single).tensors.items()}
    own = dict.fromkeys(("a.weight", "b"), "model.safetensors")
    assert found == own | {"draft": "model_mtp.safetensors"}


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
    (["weights.safetensors"], "weights.safetensors"),
    (
        [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)],
        "model-00001-of-00004.safetensors, model-00002-of-00004.safetensors, "
        "model-00003-of-00004.safetensors and 1 more",
    ),
    (["pytorch_model-00001-of-00002.bin"], "pytorch_model-00001"),
    (["model-Q4.gguf"], "model-Q4.gguf"),
]


def test_weights_that_no_loader_finds_are_listed(single: Path) -> None:
    held = (single / "model.safetensors").read_bytes()
    (single / "model.safetensors").unlink()
    (single / "training_args.bin").touch()
    for names, there in WEIGHTS:
        for name in names:
            (single / name).write_bytes(held)
        with pytest.raises(CheckpointError) as caught:
            inspect_source(single)
        assert f"holds a config.json and {there}" in str(caught.value)
        assert "neither model.safetensors nor model.safetensors.index.json" in str(caught.value)
        for name in names:
            (single / name).unlink()


def test_bytes_of_no_tensor(single: Path) -> None:
    """What safetensors itself refuses, and so every other loader."""
    file = single / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0" * 3)
    with pytest.raises(CheckpointError, match="is damaged"):
        inspect_source(single)
    with pytest.raises(SafetensorError):
        load_file(file)
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    last = max(header["a.weight"], header["b"], key=lambda entry: entry["data_offsets"])
    for by in (4, -4):
        moved = json.loads(json.dumps(header))
        name = "b" if header["b"] is last else "a.weight"
        moved[name]["data_offsets"] = [place + by for place in last["data_offsets"]]
        text = json.dumps(moved).encode()
        data = whole[8 + length :] + b"\0" * max(by, 0)
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        with pytest.raises(CheckpointError, match="is damaged"):
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


@pytest.mark.parametrize("file", [7, ["model-1.safetensors"], None, "", "../a", "/a", "b/../../a"])
def test_an_index_names_files_of_its_folder(file: Any, sharded: Path) -> None:
    index = {"weight_map": {"t1": "model-1.safetensors", "t2": file}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"the tensor t2 in .* no file of that"):
        inspect_source(sharded)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SECOND = {**F32, "data_offsets": [8, 16]}
HEADERS: dict[str, tuple[Any, Any]] = {
    "sound": (F32, SECOND),
    "cut short": ({**F32, "shape": [4]}, SECOND),
    "longer than its shape": ({**F32, "shape": [1]}, SECOND),
    "a gap": ({**F32, "shape": [1], "data_offsets": [0, 4]}, SECOND),
    "overlapping": (F32, {**F32, "shape": [3], "data_offsets": [4, 16]}),
    "negative": ({**F32, "shape": [-2]}, SECOND),
    "overflowing": ({**F32, "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}, SECOND),
    "half a byte": ({**F32, "dtype": "F4", "shape": [15]}, SECOND),
    "pairs": ({**F32, "dtype": "F4", "shape": [16]}, SECOND),
    "of three quarters of a byte": ({**F32, "dtype": "F6_E2M3", "shape": [8, 8, 1, 1]}, SECOND),
    "complex": ({**F32, "dtype": "C64", "shape": [1]}, SECOND),
    "unknown": ({**F32, "dtype": "Q4"}, SECOND),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_are_refused_as_by_safetensors(case: str, tmp_path: Path) -> None:
    """Those of files without data too, from which a plan is made."""
    first, second = HEADERS[case]
    text = json.dumps({"a": first, "b": second}).encode()
    file = tmp_path / "model.safetensors"
    for data in (bytes(16), b""):
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        if data:
            try:
                with safe_open(file, framework="numpy"):
                    refuses = False
            except SafetensorError:
                refuses = True
        if refuses:
            with pytest.raises(CheckpointError, match="is damaged"):
                read_header(file, headers_only=True)
        else:
            assert read_header(file, headers_only=True).keys() == {"a", "b"}


def test_json_too_deep_to_read_is_one_error(single: Path) -> None:
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(deep)) + deep)
    with pytest.raises(CheckpointError, match="cannot be read"):
        inspect_source(single)
    (single / "model.safetensors.index.json").write_bytes(deep)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        inspect_source(single)


def test_what_the_index_does_not_name_is_read_and_told(sharded: Path) -> None:
    """Beside it lie a draft's file, copies in other formats, and files that nobody can read."""
    one, two, rest = (torch.full((2,), float(number)) for number in (1, 2, 3))
    save_file({"t1": one, "unnamed": two}, sharded / "model-1.safetensors")
    save_file({"mtp.t": rest, "model.t1": one}, sharded / "mtp.safetensors")
    save_file({"layers.0.wq": rest}, sharded / "consolidated.safetensors")
    save_file({"t1": rest, "t2": two}, sharded / "model.fp16.safetensors")
    codes = {"t.weight_packed": torch.zeros(2, 2, dtype=torch.int32)}
    save_file(codes, sharded / "model.int4.safetensors")
    (sharded / "pulled.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    info = inspect_source(sharded)
    assert {name: header.file.name for name, header in info.tensors.items()} == {
        "t1": "model-1.safetensors",
        "unnamed": "model-1.safetensors",
        "t2": "model-2.safetensors",
        "mtp.t": "mtp.safetensors",
    }
    unnamed, beside, unread = info.remarks
    assert "does not name unnamed" in unnamed
    assert "Nothing names mtp.safetensors" in beside
    assert "mtp.t" in beside
    assert "model.int4.safetensors, pulled.safetensors" in unread


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
    mlx = {"group_size": 64, "bits": 4}
    for config in ({"quantization": mlx}, {"quantization": mlx, "quantization_config": mlx}):
        (single / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="already quantized by mlx"):
            inspect_source(single)
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


@pytest.mark.parametrize("field", ["ignore", "targets"])
def test_patterns_that_readers_never_finish_are_refused(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcompressor.runtime.limits._PATTERN_SECONDS", 0.05)
    names = ["model.layers.0.self_attn.q_proj.weight"]

    def settings(pattern: str) -> dict[str, Any]:
        held = {"targets": ["Linear", pattern] if field == "targets" else None}
        return {"config_groups": {"a": held, "b": None}, "ignore": [pattern, 3, "lm_head", "re:("]}

    with pytest.raises(CheckpointError, match=r"of M holds the pattern.*takes without end"):
        check_patterns("M", settings(f"re:([a-z0-9_.]+)*{field}!"), lambda: names)
    check_patterns("M", settings(r"re:(?:\w+\.)+\d+\.q$"), lambda: names)
    check_patterns("M", {"ignore": None, "config_groups": []}, lambda: names)
