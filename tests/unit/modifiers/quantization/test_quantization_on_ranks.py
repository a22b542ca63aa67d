# SPDX-License-Identifier: Apache-2.0
"""Two processes that train together have the same scales, and those of one that trains alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import training_on_ranks
from torch import multiprocessing


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    multiprocessing.start_processes(
        training_on_ranks.main, args=(2, str(tmp_path)), nprocs=2, start_method="forkserver"
    )
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for way in training_on_ranks.WAYS:
        alone = training_on_ranks.train(1, 0, way)
        a, b = (rank[way] for rank in ranks)
        assert a["ranges"] == b["ranges"]
        for name, one in a["tensors"].items():
            assert torch.equal(one, b["tensors"][name]), name
        losses = [(x + y) / 2 for x, y in zip(a["losses"], b["losses"], strict=True)]
        assert losses == pytest.approx(alone["losses"], rel=1e-3)
        assert a["ranges"].keys() == alone["ranges"].keys()
        _check_ranges(a["ranges"], alone["ranges"])


def _check_ranges(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for tag, value in expected.items():
        assert found[tag] == pytest.approx(value, rel=0.02, abs=0.01), tag
