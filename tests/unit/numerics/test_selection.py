# SPDX-License-Identifier: Apache-2.0
"""The least of many scores are those that a sort would take, one after another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pairs import each
from torch import Tensor

from llmcompressor.numerics import masks
from llmcompressor.numerics.masks import Pool, find_threshold, select_below


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks smaller than the pools, so that their borders are tested too."""
    monkeypatch.setattr(masks, "_CPU_CHUNK_ELEMENTS", 5)


def taken(pools: list[Pool], budget: int, dtype: torch.dtype) -> list[Tensor]:
    cut = find_threshold(lambda: pools, budget, dtype)
    found = []
    for pool in pools:
        units, cut = select_below(pool, cut)
        found.append(units)
    return found


def textbook(pools: list[Pool], budget: int, dtype: torch.dtype) -> list[Tensor]:
    """Sort all free units by magnitude, then by place; take until one does not fit."""
    units = [
        (abs(float(score.to(dtype))), number, place)
        for number, pool in enumerate(pools)
        for place, score in enumerate(pool.score_U.flatten())
        if pool.free_U.flatten()[place]
    ]
    found = [torch.zeros(pool.free_U.numel(), dtype=torch.bool) for pool in pools]
    for _, number, place in sorted(units):
        if pools[number].size > budget:
            break
        budget -= pools[number].size
        found[number][place] = True
    return [one.view(pool.free_U.shape) for one, pool in zip(found, pools, strict=True)]


VALUES = [0.0, -0.0, 1e-45, -1e-38, 1.0, -1.0, 1.0 + 2**-23, 2.5, 3e38, float("inf")]
pools = st.lists(
    st.lists(
        st.tuples(st.sampled_from(VALUES) | st.floats(-4, 4, width=32), st.booleans()),
        max_size=14,
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(drawn=pools, budget=st.integers(-1, 45))
@settings(deadline=None, max_examples=60)
def test_it_is_what_a_sort_takes(
    dtype: torch.dtype, drawn: list[list[tuple[float, bool]]], budget: int
) -> None:
    made = [
        Pool(
            torch.tensor([score for score, _ in one], dtype=torch.float32),
            torch.tensor([free for _, free in one], dtype=torch.bool),
        )
        for one in drawn
    ]
    for found, expected in zip(
        taken(made, budget, dtype), textbook(made, budget, dtype), strict=True
    ):
        assert torch.equal(found, expected)


@each(budget=range(0, 60, 3), score_dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_units_of_several_sizes_are_taken_while_they_fit(
    budget: int, score_dtype: torch.dtype
) -> None:
    """Scores without ties: with them, what is left of a budget may fit a smaller unit behind."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)) + 1.0
    parts = torch.split(order.to(score_dtype), [8, 12, 4])
    made = [
        Pool(part.view(-1, 2), torch.ones(len(part) // 2, 2, dtype=torch.bool), size)
        for part, size in zip(parts, (1, 3, 4), strict=True)
    ]
    found, expected = (way(made, budget, torch.float32) for way in (taken, textbook))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    spent = sum(int(one.sum()) * pool.size for one, pool in zip(found, made, strict=True))
    assert spent <= budget
