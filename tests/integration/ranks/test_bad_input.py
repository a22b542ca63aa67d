# SPDX-License-Identifier: Apache-2.0
"""Ranks that would not make one model together: one error on all of them, nothing written."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import rank_faults, shared_runs
from tests.support.killed_ranks import free_port
from tests.support.rank_group import Group


def _with_another_weight(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, file, {"format": "pt"})


def _with_another_block(model: Path, dtype: torch.dtype | None = None) -> None:
    """The last block has another bit, or another dtype, and what lies before is the same."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    if dtype is None:
        tensors[name].view(torch.int16)[100, 200] ^= 1
    else:
        tensors[name] = tensors[name].to(dtype)
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
        ("copied output", "does not see"),
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
    shutil.rmtree(work / "output.away", ignore_errors=True)  # the copy
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


@pytest.mark.parametrize(
    ("dtype", "named"), [(None, "weights.model.layers.1: "), (torch.float32, "source.model")]
)
@pytest.mark.parametrize("count", [2, 4])
def test_a_later_block_is_compared_before_work_without_data(
    dtype: torch.dtype | None,
    named: str,
    count: int,
    groups: dict[int, Group],
    llama_folder: Path,
    tmp_path: Path,
) -> None:
    other = shutil.copytree(llama_folder, tmp_path / "other")
    _with_another_block(other, dtype)
    (tmp_path / "work").mkdir()
    given = str(llama_folder), str(other), tmp_path / "work" / "output"
    told = groups[count](rank_faults.refused_without_data, *given)
    assert len(set(told)) == 1
    assert told[0].startswith("ArgumentError")
    assert named in told[0]
    assert f"on rank {count - 1}" in told[0]
    free = groups[count](shared_runs.quantized_of, str(llama_folder), str(other), str(given[2]))
    assert len(set(free)) == 1
    assert named in free[0]
    assert not list((tmp_path / "work").iterdir())


def test_copies_of_one_model_are_the_same_model(
    groups: dict[int, Group], llama_folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(llama_folder, tmp_path / "other")
    given = str(llama_folder), str(other), tmp_path / "output"
    assert groups[2](rank_faults.refused_without_data, *given) == ["none", "none"]


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("weight", "weights.model.layers.1.mlp.up_proj.weight: "),
        ("config", "model: "),
        ("version", "versions.torch: "),
        ("propagate_error", "calibration.propagate_error: True on rank 0, False on rank"),
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_models_in_memory_are_compared_before_work(
    how: str, named: str, count: int, groups: dict[int, Group], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    told = groups[count](rank_faults.refused_in_memory, how, rank_faults.GPTQ, output)
    assert len(set(told)) == 1
    assert told[0].startswith("ArgumentError")
    assert named in told[0]
    assert f"on rank {count - 1}" in told[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "values"),
    [("gates", ({"size": "4GB"}, {"size": "5GB"})), ("overwrite", (True, False))],
)
def test_what_the_first_rank_acts_on_at_the_end_is_compared(
    name: str, values: tuple[Any, Any], groups: dict[int, Group], llama_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    told = groups[2](rank_faults.refused_argument, name, values, str(llama_folder), output)
    assert told[0] == told[1]
    assert f"different values of {name}." in told[0]
    assert not list(tmp_path.iterdir())


def test_models_in_memory_are_compared_without_data_too(groups: dict[int, Group]) -> None:
    told = groups[2](rank_faults.refused_in_memory, "weight", rank_faults.FP8, None)
    assert told[0] == told[1]
    assert "weights.model.layers.1.mlp.up_proj.weight" in told[0]
    assert groups[2](rank_faults.refused_in_memory, "", rank_faults.FP8, None) == ["none", "none"]


def test_stages_are_compared_before_the_first_one(
    groups: dict[int, Group], llama_folder: Path, tmp_path: Path
) -> None:
    every = groups[4](rank_faults.stages_refused, str(llama_folder), tmp_path / "output")
    assert every == every[:1] * 4
    scheme, output, argument = every[0]
    assert "quant.recipe" in scheme
    assert "output_dir" in output
    assert "arguments.propagate_error: True on rank 0, False on rank 3" in argument
    assert not list(tmp_path.iterdir())


def test_trainings_are_compared_before_the_first_step(tmp_path: Path) -> None:
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    environments = [{**given, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, context) as pool:  # none begins a second one: the first two wait
        begun = [pool.submit(rank_faults.trained, tmp_path / "output", e) for e in environments]
        first, second = (one.result(timeout=100) for one in begun)
    assert first == second
    assert "training.learning_rate: 0.001 on rank 0, 0.01 on rank 1" in first[0]
    assert "output_dir" in first[1]
    assert not list(tmp_path.iterdir())


def test_the_first_rank_tells_the_warnings_of_the_others_once(
    groups: dict[int, Group], llama_folder: Path, tmp_path: Path
) -> None:
    first, *others = groups[4](rank_faults.warned, str(llama_folder), tmp_path / "output")
    assert first == ["All have it.", *first[1:-1], "Rank 1: Slow {disk}."]
    assert set(first) == {"All have it.", "Rank 1: Slow {disk}."}
    assert others == [[], [], []]
