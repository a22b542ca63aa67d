# SPDX-License-Identifier: Apache-2.0
"""Ranks with a CUDA device each, whose statistics stay there and travel by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support import rank_work
from tests.support.rank_group import group_of
from tests.support.rank_runs import LINEARS, compress, share_differing
from tests.support.small_models import llama

GPTQ = {"GPTQModifier": {**LINEARS, "scheme": "W4A16"}}
BACKEND = "cpu:gloo,cuda:nccl"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a process without a group."""
    folder = tmp_path_factory.mktemp("alone") / "output"
    compress(str(model), folder, GPTQ, propagate_error=False, device="cuda")
    return folder


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_write_what_one_process_writes(
    count: int, model: Path, alone: Path, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")  # NCCL takes no two ranks on one
    output = tmp_path / "output"
    given = {"propagate_error": False, "device": "cuda"}
    with group_of(count, tmp_path, backend=BACKEND) as group:
        found = group(compress, str(model), output, GPTQ, **given)
    assert all(isinstance(one, tuple) for one in found), found
    assert [told for told, _ in found] == [[]] * count, "the work is shared"
    assert all(torch.equal(logits, found[0][1]) for _, logits in found)
    assert share_differing(output, alone) <= 0.001


def test_sums_of_two_devices_stay_on_them(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    with group_of(2, tmp_path, backend=BACKEND) as group:
        assert group(rank_work.on_device) == [(3.0, "cuda", 2.0, "cuda")] * 2
