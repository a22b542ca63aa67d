# SPDX-License-Identifier: Apache-2.0
"""Four ranks do about a quarter of everything each, and send about what the plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import rank_faults, rank_runs
from tests.support.small_models import llama, token_rows

from llmcompressor import plan

GPTQ = {"GPTQModifier": {**rank_runs.LINEARS, "scheme": "W4A16"}}
RANKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers beside small embeddings, so that most bytes are those of layers."""
    folder: Path = tmp_path_factory.mktemp("six")
    llama(num_hidden_layers=6, vocab_size=128).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shares(groups: Any, folder: Path, tmp_path_factory: Any) -> list[dict[str, int]]:
    output = tmp_path_factory.mktemp("shares") / "output"
    groups[RANKS](rank_runs.compress, str(folder), output, GPTQ)
    found: list[dict[str, int]] = json.loads((output / "compression_report.json").read_text())[
        "ranks"
    ]
    return found


def test_each_rank_has_about_a_quarter(shares: list[dict[str, int]]) -> None:
    assert [one["samples"] for one in shares] == [16 // RANKS] * RANKS
    for what in ("solved", "written"):
        total = sum(one[what] for one in shares)
        for rank, one in enumerate(shares):
            assert 0.2 <= one[what] / total <= 0.3, (rank, what)


def test_ranks_of_a_machine_divide_its_free_memory(
    groups: Any, folder: Path, tmp_path: Path
) -> None:
    found = groups[2](rank_faults.budgets, str(folder), tmp_path / "output")
    assert found == [[2**29], [2**29]]


def test_what_travels_is_near_the_lower_bound(shares: list[dict[str, int]], folder: Path) -> None:
    bound = lower_bound(folder)
    assert sum(one["sent"] for one in shares) == sum(one["received"] for one in shares)
    sent = sum(one["sent"] for one in shares)
    assert bound <= sent <= 1.2 * bound


def lower_bound(folder: Path) -> int:
    """Bytes that all ranks send at least: statistics to their owners, and weights to all others."""
    found = plan(str(folder), {"modifiers": GPTQ}, token_rows(16, 64), ranks=RANKS).ranks
    return sum(one.reduce_sent + one.broadcast_sent for one in found.loads)
