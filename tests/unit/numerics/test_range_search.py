# SPDX-License-Identifier: Apache-2.0
"""The search over shrunk ranges, against loops and in its limiting cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.errors import InputError
from llmcompressor.numerics import range_search
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.range_search import ShrinkSearch, search_range
from llmcompressor.numerics.scales import ScaleFormat, scales_from_range

GRIDS = [Grid("int", 4), Grid("int", 3, symmetric=False), Grid("float", 8), Grid("float", 4)]


def loss(
    x_N: Tensor, low: Tensor, high: Tensor, grid: Grid, *, norm: float, weight_N: Tensor
) -> float:
    scale, zero = scales_from_range(low, high, grid)
    rounded = grid.fake_quantize(x_N, scale, None if grid.symmetric else zero)
    return float(((rounded - x_N).abs().double() ** norm * weight_N).sum())


def textbook(
    values_SN: Tensor, grid: Grid, search: ShrinkSearch, weight_SN: Tensor | None = None
) -> tuple[list[float], list[float]]:
    """One cell and one fraction after another."""
    weight_SN = torch.ones_like(values_SN) if weight_SN is None else weight_SN
    best = [(float("inf"), 0.0, 0.0)] * len(values_SN)
    idle = 0
    for p in search.fractions():
        improved = False
        for s, (x_N, weight_N) in enumerate(zip(values_SN, weight_SN, strict=True)):
            low, high = p * (x_N.min() * search.expand), p * (x_N.max() * search.expand)
            error = loss(x_N, low, high, grid, norm=search.norm, weight_N=weight_N)
            if error < best[s][0]:
                best[s], improved = (error, low.item(), high.item()), True
        idle = 0 if improved else idle + 1
        if search.patience and idle >= search.patience:
            break
    return [b[1] for b in best], [b[2] for b in best]


@pytest.fixture
def values() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(6, 24)
    x[1] *= torch.randn(24) ** 2
    x[2] = 0
    x[3].abs_()
    return x


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(
    "search",
    [
        ShrinkSearch(),
        ShrinkSearch(maxshrink=0.8, patience=0, resolution=30),
        ShrinkSearch(maxshrink=0.95, patience=2, resolution=20, norm=3.0, inclusive=True),
        ShrinkSearch(maxshrink=0.5, patience=7, resolution=40, expand=1.8),
    ],
    ids=["default", "exhaustive", "inclusive", "expanded"],
)
def test_the_search_equals_loops(values, grid, search):
    low, high = search_range(values, grid, search)
    expected_low, expected_high = textbook(values, grid, search)
    assert low.tolist() == expected_low
    assert high.tolist() == expected_high


@pytest.mark.parametrize("patience", [1, 2, 3, 6])
def test_patience_ends_the_search_where_loops_end_it(values, patience):
    search = ShrinkSearch(maxshrink=0.99, patience=patience, resolution=50)
    assert (
        search_range(values, Grid("int", 8), search)[1].tolist()
        == (textbook(values, Grid("int", 8), search)[1])
    )


@pytest.mark.parametrize("chunk", [1, 7, 50, 64])
def test_chunks_do_not_change_the_result(values, chunk, monkeypatch):
    importance_PN = torch.rand(2, 24)
    search = ShrinkSearch(maxshrink=0.9, resolution=20)
    grid = Grid("int", 4)
    whole = search_range(values, grid, search, importance_PN=importance_PN)
    monkeypatch.setattr(range_search, "_CHUNK_ELEMENTS", chunk)
    parts = search_range(values, grid, search, importance_PN=importance_PN)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_error_is_never_above_that_of_the_extremes(values, grid):
    search = ShrinkSearch(maxshrink=0.8, norm=2.0)
    low, high = search_range(values, grid, search)
    ones = torch.ones(values.shape[1])
    found = [
        loss(x, a, b, grid, norm=2.0, weight_N=ones)
        for x, a, b in zip(values, low, high, strict=True)
    ]
    plain = [loss(x, x.min(), x.max(), grid, norm=2.0, weight_N=ones) for x in values]
    assert all(f <= p for f, p in zip(found, plain, strict=True))
    assert any(f < p for f, p in zip(found, plain, strict=True))


def test_power_of_two_scales_are_searched_as_they_are_stored():
    torch.manual_seed(2)
    values = torch.randn(20, 32)
    grid, search = Grid("float", 4), ShrinkSearch(maxshrink=0.6, patience=0, norm=2.0)

    def error(low: Tensor, high: Tensor) -> Tensor:
        scale, _ = scales_from_range(low, high, grid, scale_format=ScaleFormat.E8M0)
        return (grid.fake_quantize(values, scale[:, None]) - values).square().sum(1)

    as_stored = error(*search_range(values, grid, search, scale_format=ScaleFormat.E8M0))
    as_plain = error(*search_range(values, grid, search))
    assert bool((as_stored <= as_plain).all())
    assert bool((as_stored < as_plain).any())


@pytest.mark.parametrize(
    "field",
    [
        {"maxshrink": 1.5},
        {"patience": -1},
        {"resolution": 0},
        {"norm": float("inf")},
        {"expand": 0},
    ],
)
def test_settings_out_of_bounds_are_refused(field):
    with pytest.raises(InputError, match=next(iter(field))):
        ShrinkSearch(**field)
