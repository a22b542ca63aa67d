# SPDX-License-Identifier: Apache-2.0
"""Prints tell models and data apart, and are the same for the same."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pandas import DataFrame
from tests.support import small_models as small
from torch.nn import Linear, Module

from llmcompressor.entrypoints.fingerprints import (
    data_fingerprint,
    folder_fingerprint,
    is_result_of,
    model_fingerprint,
    path_fingerprint,
    record_change,
)


def _set(model: Any, place: int, value: float = 1.0) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.view(-1)[place] = value


def _rename(model: Any) -> None:
    layer = model.model.layers[1]
    layer.mlp.other_proj = layer.mlp.up_proj
    del layer.mlp.up_proj


@pytest.mark.parametrize(
    ("change", "items"),
    [
        (lambda model: _set(model, 0), {"weights"}),
        (lambda model: _set(model, 20_001), {"weights"}),
        (lambda model: _set(model, -1), {"weights"}),
        (lambda model: model.model.norm.weight.data.neg_(), {"weights"}),
        (lambda model: model.model.norm.register_buffer("kept", torch.ones(2)), None),
        (lambda model: model.float(), {"tensors", "weights"}),
        (_rename, None),
        (lambda model: setattr(model.config, "rms_norm_eps", 0.1), {"config"}),
    ],
)
def test_models_that_differ(change: Callable[[Any], None], items: set[str] | None) -> None:
    model = small.llama()
    before = model_fingerprint(model)
    assert model_fingerprint(small.llama()) == before
    change(model)
    after = model_fingerprint(model)
    assert {name for name in before if after[name] != before[name]} == (
        items or {"tensors", "weights"}
    )


def test_what_saving_changes_does_not_matter(tmp_path: Path) -> None:
    model = small.llama()
    before = model_fingerprint(model)
    model.save_pretrained(tmp_path)
    model.config.use_cache = False
    assert model_fingerprint(model) == before
    assert model_fingerprint(type(model).from_pretrained(tmp_path, dtype="auto")) == before


def test_of_large_tensors_windows_are_hashed() -> None:
    """All of a trained weight changes; both ends are looked at."""
    large = Linear(1024, 512, bias=False)
    before = model_fingerprint(large)["weights"]
    found = {before}
    for place in (0, large.weight.numel() // 2, large.weight.numel() - 1):
        with torch.no_grad():
            large.weight.view(-1)[place] += 1
        found.add(model_fingerprint(large)["weights"])
    assert len(found) == 3, "the middle lies between two windows"
    with torch.no_grad():
        large.weight.mul_(1.0001)
    assert model_fingerprint(large)["weights"] not in found


def _folder(tmp_path: Path, name: str, **changes: Any) -> Path:
    small.llama(**changes).save_pretrained(tmp_path / name)
    (tmp_path / name / "tokenizer_config.json").write_text("{}")
    return tmp_path / name


def test_folders_that_differ(tmp_path: Path) -> None:
    first = _folder(tmp_path, "first")
    before = folder_fingerprint(first)
    copied = Path(shutil.copytree(first, tmp_path / "copied", copy_function=shutil.copyfile))
    assert folder_fingerprint(copied) == before, "whenever and wherever it was written"
    weights = folder_fingerprint(_folder(tmp_path, "weights", seed=1))
    assert weights["files"] == before["files"], "the headers are the same"
    assert weights["weights"] != before["weights"]
    shapes = folder_fingerprint(_folder(tmp_path, "shapes", intermediate_size=128))
    assert shapes["files"]["model.safetensors"] != before["files"]["model.safetensors"]
    (copied / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    assert folder_fingerprint(copied)["processor"] != before["processor"]
    (copied / "model.safetensors").unlink()
    assert set(folder_fingerprint(copied)["files"]) > {"config.json"}, "no model any more"


ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ROWS, [*ROWS[:1], {"input_ids": [4, 6]}]),
        (ROWS, [*ROWS[:1], {"labels": [4, 5]}]),
        (["a b", "c"], ["a b", "d"]),
        (["ab", "c"], ["a", "bc"]),
        (["a", "b"], ["b", "a"]),
        ([{"x": [0.5]}], [{"x": [0.25]}]),
        ([{"x": 2**70}], [{"x": 2**70 + 1}]),
        ([[2**70, 1]], [[2**70, 2]]),
        ([{"x": None}], [{"x": False}]),
        ([torch.tensor([1, 2])], [torch.tensor([1, 3])]),
        ([torch.zeros(2)], [torch.zeros(2, 1)]),
        ([np.array([1, 2])], [np.array([1, 3])]),
        ([np.array(["a", [1]], dtype=object)], [np.array(["a", [2]], dtype=object)]),
        ({"train": ROWS, "test": ["a"]}, {"train": ROWS, "test": ["b"]}),
        ({"text": ["a", "b"]}, {"text": ["a", "c"]}),
        (DataFrame({"text": ["a", "b"]}), DataFrame({"text": ["a", "c"]})),
        (small.token_rows(), small.token_rows(seed=1)),
        ("wikitext", "c4"),
    ],
)
def test_data_that_differs(one: Any, other: Any) -> None:
    assert data_fingerprint(one) == data_fingerprint(copy.deepcopy(one))
    assert data_fingerprint(one) != data_fingerprint(other)
    json.dumps(data_fingerprint(one))


def test_files_that_differ(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}')
    first, folder = data_fingerprint(str(file)), path_fingerprint(tmp_path)
    file.write_text('{"text": "two"}')
    assert data_fingerprint(file) != first
    assert path_fingerprint(tmp_path) != folder
    file.unlink()
    assert path_fingerprint(file) == {"path": str(file)}


def _doubled(model: Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def test_what_a_run_has_changed_is_known_until_changed_again() -> None:
    model = Linear(4, 4)
    begun = model_fingerprint(model)
    assert not is_result_of(model, begun)
    _doubled(model)
    record_change(model, begun)
    assert is_result_of(model, begun)
    record_change(model, model_fingerprint(model))  # a run that did nothing
    assert is_result_of(model, begun)
    assert not is_result_of(copy.deepcopy(model), begun), "another object"
    _doubled(model)
    assert not is_result_of(model, begun)
    record_change("a folder", begun)
    assert not is_result_of("a folder", begun)
