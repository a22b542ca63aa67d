# SPDX-License-Identifier: Apache-2.0
"""Folders whose files, names and index disagree: the values are those that transformers takes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import small_models
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmcompressor import plan
from llmcompressor.checkpoint.meta_model import build_meta_model
from llmcompressor.checkpoint.source import inspect_source
from llmcompressor.checkpoint.tensor_files import read_tensors
from llmcompressor.errors import CheckpointError

FIRST, LAST = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
NORM = "model.norm.weight"
OTHER = torch.full((32,), 7.0, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "sharded"
    model = small_models.one_block(hidden_size=32, intermediate_size=32, vocab_size=64)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert {path.name for path in folder.glob("*.safetensors")} == {FIRST, LAST}
    return folder


@contextmanager
def index_of(folder: Path) -> Iterator[dict[str, str]]:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    yield index["weight_map"]
    file.write_text(json.dumps(index))


def add(folder: Path, file: str, tensors: dict[str, Tensor]) -> None:
    held = load_file(folder / file) if (folder / file).exists() else {}
    save_file(held | tensors, folder / file, {"format": "pt"})


def in_first_shard_too(folder: Path) -> None:
    add(folder, FIRST, {NORM: OTHER})
    add(folder, LAST, {NORM: OTHER + 1})


def index_names_the_first(folder: Path) -> None:
    in_first_shard_too(folder)
    with index_of(folder) as weight_map:
        weight_map[NORM] = FIRST


def without_prefix(folder: Path) -> None:
    add(folder, LAST, {"norm.weight": OTHER, "embed_tokens.weight": OTHER.repeat(64, 1)})


def unnamed(folder: Path) -> None:
    with index_of(folder) as weight_map:
        del weight_map[NORM]


def misplaced(folder: Path) -> None:
    with index_of(folder) as weight_map:
        weight_map[NORM] = FIRST if weight_map[NORM] == LAST else LAST


def named_but_absent(folder: Path) -> None:
    with index_of(folder) as weight_map:
        weight_map["model.rotary_emb.inv_freq"] = FIRST


def stale_index(folder: Path) -> None:
    """Of the shards that one file has replaced."""
    whole = load_file(folder / FIRST) | load_file(folder / LAST)
    save_file(whole | {NORM: OTHER}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        in_first_shard_too,
        index_names_the_first,
        without_prefix,
        unnamed,
        misplaced,
        named_but_absent,
        stale_index,
    ],
)
def test_values_are_those_that_transformers_takes(
    change: Callable[[Path], None], sharded: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "source"))
    change(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    source = inspect_source(folder, allow_absent=True)
    names = build_meta_model(source).names
    values = dict(read_tensors({name: source.tensors[name] for name in names}))
    assert len(values) == len(loaded)
    for name, value in values.items():
        assert torch.equal(value, loaded[names[name].target]), name


def test_a_plan_tells_of_tensors_that_no_index_names(
    sharded: Path, tmp_path: Path, warned: list[str]
) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "source"))
    add(folder, "mtp.safetensors", {"mtp.fc.weight": OTHER.repeat(4, 1)})
    plan(model=str(folder), recipe="modifiers: {QuantizationModifier: {scheme: W8A16}}")
    assert any("Nothing names mtp.safetensors" in line for line in warned)


def test_an_index_of_lost_tensors_is_refused_without_a_class(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "source"))
    named_but_absent(folder)
    with pytest.raises(CheckpointError, match="none holds it"):
        inspect_source(folder)
