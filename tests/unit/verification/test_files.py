# SPDX-License-Identifier: Apache-2.0
"""Faults of files: an index, shards or headers that are not what they should be."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoint_samples import INDEX, Sample, dense, made

from llmcompressor import verify
from llmcompressor.errors import ArgumentError, CheckpointError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

Damage = Callable[[Path], None]


def index(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))


def header(folder: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Change the header of the first shard and nothing else."""
    path = folder / FIRST
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    content = json.loads(data[8 : 8 + length])
    change(content)
    text = json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def config_gone(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def config_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def index_gone(folder: Path) -> None:
    (folder / INDEX).unlink()


def index_is_no_json(folder: Path) -> None:
    (folder / INDEX).write_text("weights")


def index_without_a_map(folder: Path) -> None:
    index(folder, lambda content: content.pop("weight_map"))


def index_with_a_number_for_metadata(folder: Path) -> None:
    index(folder, lambda content: content.update(metadata=3))


def shard_gone(folder: Path) -> None:
    (folder / SECOND).unlink()


def shard_truncated(folder: Path) -> None:
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:-100])


def header_truncated(folder: Path) -> None:
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:200])


def shard_not_fetched(folder: Path) -> None:
    (folder / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def shard_is_empty(folder: Path) -> None:
    (folder / SECOND).write_bytes(b"")


def shard_is_something_else(folder: Path) -> None:
    (folder / SECOND).write_bytes(b"\x00" * 4096)


def header_is_no_json(folder: Path) -> None:
    data = bytearray((folder / SECOND).read_bytes())
    data[9] = 0
    (folder / SECOND).write_bytes(data)


def unknown_dtype(folder: Path) -> None:
    header(folder, lambda content: content[HEAD].update(dtype="F4"))


def another_shape(folder: Path) -> None:
    header(folder, lambda content: content[HEAD].update(shape=[128, 127]))


def shifted(folder: Path) -> None:
    def change(content: dict[str, dict[str, object]]) -> None:
        first, last = content[HEAD]["data_offsets"]  # type: ignore[misc]  # read as JSON
        content[HEAD]["data_offsets"] = [first + 2, last + 2]

    header(folder, change)


def sizes_that_are_floats(folder: Path) -> None:
    header(folder, lambda content: content[HEAD].update(shape=[128.0, 128]))


def offsets_that_are_texts(folder: Path) -> None:
    def change(content: dict[str, dict[str, object]]) -> None:
        offsets = content[HEAD]["data_offsets"]
        content[HEAD]["data_offsets"] = [str(one) for one in offsets]  # type: ignore[attr-defined]  # JSON

    header(folder, change)


def sizes_below_zero(folder: Path) -> None:
    def change(content: dict[str, dict[str, object]]) -> None:
        shape = content[HEAD]["shape"]
        content[HEAD]["shape"] = [-size for size in shape]  # type: ignore[attr-defined]  # JSON

    header(folder, change)


def notes_that_are_no_texts(folder: Path) -> None:
    header(folder, lambda content: content.update(__metadata__={"format": 3}))


def header_with_a_mark_of_the_byte_order(folder: Path) -> None:
    data = (folder / FIRST).read_bytes()
    length = struct.unpack("<Q", data[:8])[0] + 3
    (folder / FIRST).write_bytes(struct.pack("<Q", length) + b"\xef\xbb\xbf" + data[8:])


def bytes_behind_the_last(folder: Path) -> None:
    with (folder / FIRST).open("ab") as stream:
        stream.write(b"1234")


def placed_in_another_shard(folder: Path) -> None:
    index(folder, lambda content: content["weight_map"].update({HEAD: SECOND}))  # type: ignore[attr-defined]  # JSON


def tensor_left_over(folder: Path) -> None:
    tensors = load_file(folder / FIRST)
    save_file({**tensors, "left.over": torch.ones(3)}, folder / FIRST)


def shard_left_over(folder: Path) -> None:
    save_file({"left.over": torch.ones(3)}, folder / "model-00003-of-00003.safetensors")


def tensor_in_two_shards(folder: Path) -> None:
    tensors = load_file(folder / SECOND)
    save_file({**tensors, HEAD: torch.ones(3)}, folder / SECOND)


def another_total(folder: Path) -> None:
    index(folder, lambda content: content["metadata"].update(total_size=1))  # type: ignore[attr-defined]  # JSON


DAMAGES: list[tuple[str, str, Damage]] = [
    ("F1", "config.json", config_gone),
    ("F1", "config.json", config_is_no_json),
    ("F1", "config.json", config_is_a_list),
    ("F2", INDEX, index_gone),
    ("F2", INDEX, index_is_no_json),
    ("F2", INDEX, index_without_a_map),
    ("F2", INDEX, index_with_a_number_for_metadata),
    ("F3", SECOND, shard_gone),
    ("F3", SECOND, shard_truncated),
    ("F3", SECOND, header_truncated),
    ("F3", SECOND, shard_not_fetched),
    ("F4", SECOND, shard_is_empty),
    ("F4", SECOND, shard_is_something_else),
    ("F4", SECOND, header_is_no_json),
    ("F4", HEAD, unknown_dtype),
    ("F4", HEAD, another_shape),
    ("F4", HEAD, shifted),
    ("F4", FIRST, bytes_behind_the_last),
    ("F4", FIRST, sizes_that_are_floats),
    ("F4", FIRST, offsets_that_are_texts),
    ("F4", FIRST, sizes_below_zero),
    ("F4", FIRST, notes_that_are_no_texts),
    ("F4", FIRST, header_with_a_mark_of_the_byte_order),
    ("F5", HEAD, placed_in_another_shard),
    ("F6", "left.over", tensor_left_over),
    ("F6", "model-00003-of-00003.safetensors", shard_left_over),
    ("F7", HEAD, tensor_in_two_shards),
    ("F8", INDEX, another_total),
]


@pytest.fixture(scope="session")
def sample() -> Sample:
    found = made(dense())
    found.tensors[NORM] = torch.ones(128, dtype=torch.bfloat16)
    return found


@pytest.mark.parametrize(
    ("rule", "module", "damage"),
    [pytest.param(*one, id=f"{one[0]}-{one[2].__name__}") for one in DAMAGES],
)
def test_a_damaged_file_is_found(
    rule: str, module: str, damage: Damage, sample: Sample, tmp_path: Path
) -> None:
    folder = sample.write(tmp_path / "checkpoint")
    assert verify(folder, tp=1).ok
    damage(folder)
    report = verify(folder, tp=1)
    assert not report.ok
    assert (rule, module) in {(each.rule, each.module) for each in report.findings}, str(report)


@pytest.mark.parametrize("cut", range(8))
def test_a_shard_cut_anywhere_is_an_error_and_no_exception(
    cut: int, sample: Sample, tmp_path: Path
) -> None:
    folder = sample.write(tmp_path / "checkpoint")
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[: len(data) * cut // 8])
    report = verify(folder, tp=1)
    assert {"F3", "F4"} & {each.rule for each in report.findings}


def test_a_folder_without_a_model_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        verify(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no model"):
        verify(tmp_path)


@pytest.mark.parametrize("given", ["", 5, None, b"model"])
def test_what_is_no_path_is_an_argument_error(given: object, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'checkpoint' cannot be .*path"):
        verify(given)  # type: ignore[arg-type]
    if given is not None:
        with pytest.raises(ArgumentError, match="'reference' cannot be"):
            verify(tmp_path, given)  # type: ignore[arg-type]


def test_a_damaged_reference_is_refused(sample: Sample, tmp_path: Path) -> None:
    folder = sample.write(tmp_path / "checkpoint")
    other = sample.write(tmp_path / "reference")
    shard_truncated(other)
    with pytest.raises(CheckpointError, match="is damaged"):
        verify(folder, other)
