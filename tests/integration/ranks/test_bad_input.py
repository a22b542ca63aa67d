# SPDX-License-Identifier: Apache-2.0
"""Ranks that would not make one model together: one error on all of them, nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.support import rank_faults
from tests.support.rank_group import Group


def _with_another_weight(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, file, {"format": "pt"})


def _with_another_config(model: Path) -> None:
    file = model / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "rms_norm_eps": 0.5}))


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("other token", "7 of 8 samples are the same"),
        ("other order", "8 of 8 samples are the same"),
        ("other recipe", "different values of recipe"),
        ("other version", "versions.torch"),
        ("other weight in the model", "weights"),
        ("other config of the model", "config.json"),
        ("other output", "does not see"),
        ("few samples", "2 ranks are to share 1"),
    ],
)
def test_all_ranks_refuse(
    how: str, named: str, groups: dict[int, Group], llama_folder: Path, tmp_path: Path
) -> None:
    model, other = (shutil.copytree(llama_folder, tmp_path / one) for one in ("model", "other"))
    if "weight" in how:
        _with_another_weight(other)
    elif "config" in how:
        _with_another_config(other)
    work = tmp_path / "work"
    work.mkdir()
    kind = how if " in " not in how and " of " not in how else "other model"
    told = groups[2](rank_faults.refused, kind, str(model), str(other), work / "output")
    assert told[0] == told[1]
    assert told[0].startswith(("ArgumentError", "OutputError"))
    assert named in told[0]
    assert not list(work.iterdir())


@pytest.mark.parametrize("how", ["other token", "other order"])
def test_samples_are_compared_in_batches_of_any_size(
    how: str, groups: dict[int, Group], llama_folder: Path, tmp_path: Path
) -> None:
    model, output = str(llama_folder), tmp_path / "output"
    told = groups[2](rank_faults.refused, how, model, model, output, 4)
    assert told[0] == told[1]
    assert ("7 of 8 samples" if how == "other token" else "8 of 8 samples") in told[0]
    assert not output.exists()
