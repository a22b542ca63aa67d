# SPDX-License-Identifier: Apache-2.0
"""Ranks share the windows of an evaluation, and all have the figures of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import shared_runs
from tests.support.rank_group import Group, group_of
from tests.support.small_models import llama


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models that differ in their weights."""
    folder = tmp_path_factory.mktemp("models")
    for seed in range(2):
        llama(seed=seed, initializer_range=0.2).save_pretrained(folder / f"{seed}")
    return [str(folder / f"{seed}") for seed in range(2)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Two ranks."""
    with group_of(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.mark.parametrize("batch_size", [1, 3])
def test_all_ranks_have_the_figures_of_one_process(
    models: list[str], two: Group, batch_size: int
) -> None:
    given: dict[str, Any] = {"reference": models[1], "batch_size": batch_size}
    alone, sizes = shared_runs.measured(models[0], **given)
    assert sum(sizes) == 14
    found = two(shared_runs.measured, models[0], **given)
    assert [sum(sizes) for _, sizes in found] == [7, 7]
    assert found[0][0] == found[1][0]
    rel = 1e-9 if batch_size == 1 else 1e-6  # other batches round otherwise
    assert found[0][0] == pytest.approx(alone, rel=rel)


def test_a_model_that_is_spread_over_ranks_runs_alike_on_all(models: list[str], two: Group) -> None:
    assert list(map(sum, two(shared_runs.spread, models[0]))) == [14, 14]


def test_ranks_that_do_not_agree_are_told_once_each(models: list[str], two: Group) -> None:
    first, second = two(shared_runs.unlike, *models)
    for rank in (first, second):
        assert rank[0].startswith("ArgumentError")
        for place, what in enumerate(("checkpoint", "reference", "dataset")):
            assert f"and differ in {what}." in rank[place]
        assert "There is no model folder" in rank[3]
        assert rank[4].startswith("ArgumentError: The text has 1 windows for 2 processes")
    assert first[3].startswith("ProcessError: Process 1 has failed: CheckpointError")


def test_a_rank_that_evaluates_alone_is_told_so(models: list[str], tmp_path: Path) -> None:
    with group_of(2, tmp_path) as group:
        error, _ = group(shared_runs.alone, models[0])
    assert error == (
        "ProcessError: Rank 0 has waited 0.3 s for rank 1 of 2 to call evaluate. Call it on all "
        "ranks; if they need longer, give init_process_group a longer timeout."
    )
