# SPDX-License-Identifier: Apache-2.0
"""Statistics of several ranks add up to those of all data, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support import rank_statistics as work
from tests.support.rank_group import Group, group_of

from llmcompressor.observers.input_statistics import InputStatistics

RANKS = 3


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    with group_of(RANKS, folder) as run:
        yield run


def of_all(rows: int, *, twin: bool) -> InputStatistics:
    """The statistics of the data of all ranks, in one process."""
    found = work.statistics(0, rows, twin=twin)
    for rank in range(1, RANKS):
        found.merge(work.statistics(rank, rows, twin=twin))
    return found


@pytest.mark.parametrize(("rows", "twin"), [(4, False), (4, True), (work.C, True)])
def test_sums_of_ranks_are_those_of_one_process(group: Group, rows: int, twin: bool) -> None:
    expected = work.as_dict(of_all(rows, twin=twin))
    assert (expected["missing"] is None) == (not twin or rows == work.C)
    first, *others = group(work.sums, rows, twin=twin, owner=None)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-3)
            assert all(torch.equal(one[name], first[name]) for one in others), name
        else:
            assert all(one[name] == value for one in (first, *others)), name
    assert torch.equal(first["gram"], first["gram"].T)


def test_an_owner_gets_the_sums_alone(group: Group) -> None:
    first, owner, last = group(work.sums, 4, twin=False, owner=1)
    whole = group(work.sums, 4, twin=False, owner=None)[0]
    assert torch.equal(owner["gram"], whole["gram"])
    for rank, other in ((0, first), (2, last)):
        own = work.statistics(rank, 4, twin=False).gram
        torch.testing.assert_close(other["gram"], own, rtol=1e-5, atol=1e-3)
        assert other["tokens"] == owner["tokens"]


def test_a_rank_without_tokens_of_an_expert_adds_nothing(group: Group) -> None:
    for found in group(work.routed):
        assert found.keys() == set(range(RANKS))
        for place, one in found.items():
            x = work.tokens(place)
            assert one["tokens"] == len(x)
            torch.testing.assert_close(one["gram"], x.T @ x, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", work.OBSERVERS)
def test_ranges_of_ranks_are_those_of_observers_merged_in_order(group: Group, name: str) -> None:
    alone = work.observer(name)
    for rank in range(RANKS - 1):
        alone.merge(work.observed(rank, name))
    for observations, minimum, maximum in group(work.merged, name):
        assert observations == alone.observations == 2 * (RANKS - 1)
        assert torch.equal(minimum, alone.range()[0])
        assert torch.equal(maximum, alone.range()[1])
