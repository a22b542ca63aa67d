# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from llmcompressor.modeling.weights import first_nonfinite
from llmcompressor.numerics.extremes import is_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_element_is_found(bad: float, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(dtype)
    assert first_nonfinite(model) is None
    model[1].weight.data[3, 5] = bad
    assert first_nonfinite(model) == "1.weight"
    assert first_nonfinite(model, ["0"]) is None
    model[0].bias.data[0] = bad
    assert first_nonfinite(model) == "0.bias"


def test_sums_that_overflow_are_no_infinities() -> None:
    assert is_finite(torch.full((1000,), 3e38))
    assert is_finite(torch.full((1000,), 3e38, dtype=torch.bfloat16))
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))


def _told(place: tuple[int, str]) -> list[str | None]:
    """What one of two processes, each with half of every matrix, is told as they go bad."""
    rank, store = place
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(2)  # several are looked at at once, and do not meet on the way
    try:
        linears = (torch.nn.Linear(8, 8, bias=False) for _ in range(8))
        model = fully_shard(torch.nn.Sequential(*linears), mesh=init_device_mesh("cpu", (2,)))
        told = [first_nonfinite(model)]
        for number, holder in ((5, 1), (6, 0), (2, 0)):
            if rank == holder:
                model[number].weight.detach().to_local()[0, 0] = float("nan")
            told.append(first_nonfinite(model))
        return told
    finally:
        distributed.destroy_process_group()


def test_what_one_process_has_of_a_matrix_is_found_by_all(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, context) as workers:
        places = [(rank, str(tmp_path / "store")) for rank in range(2)]
        answers = list(workers.map(_told, places, timeout=120))
    assert answers == [[None, "5.weight", "5.weight", "2.weight"]] * 2
