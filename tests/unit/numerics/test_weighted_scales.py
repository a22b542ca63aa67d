# SPDX-License-Identifier: Apache-2.0
"""Scales of the least weighted rounding error, beside a search over fractions one by one."""

from __future__ import annotations

import pytest
import torch
from tests.support.pairs import pairs
from torch import Tensor

from llmcompressor.numerics import weighted_scales as module
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.weighted_scales import FRACTIONS, STEPS, weighted_scales

R, G, K = 3, 2, 16


def weight(*batch: int, seed: int = 0) -> Tensor:
    """Rows with a few large values."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, R, G * K, generator=draw) ** 3


def curvature(*batch: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.rand(*batch, G * K, generator=draw) ** 4


def error(
    values_K: Tensor, scale: float, zero: float | None, grid: Grid, weights_K: Tensor
) -> float:
    """The weighted error of rounding, value by value."""
    lost = 0.0
    for value, counts in zip(values_K.tolist(), weights_K.tolist(), strict=True):
        code = min(max(round(value / scale + (zero or 0)), grid.qmin), grid.qmax)
        lost += counts * (value - (code - (zero or 0)) * scale) ** 2
    return lost


def searched(values_K: Tensor, grid: Grid, weights_K: Tensor) -> float:
    """The error that the search ends with, part by part of the extremes."""
    low, high = min(float(values_K.min()), 0.0), max(float(values_K.max()), 0.0)
    width = 2 * max(-low, high) if grid.symmetric else high - low

    def of(share: float) -> tuple[float, float]:
        scale = share * width / (grid.qmax - grid.qmin)
        zero = None if grid.symmetric else round(grid.qmin - share * low / scale)
        return error(values_K, scale, zero, grid, weights_K), share

    least, best = min(of(share) for share in FRACTIONS)
    for step in STEPS:
        least, best = min((least, best), *(of(min(best + way * step, 1.0)) for way in (1, -1)))
    return least


@pairs(bits=[2, 3, 4], symmetric=[True, False])
def test_the_search_is_that_of_a_loop(bits: int, symmetric: bool) -> None:
    grid = Grid("int", bits, symmetric)
    w_RC, h_C = weight(), curvature()
    scale_RG, zero_RG = weighted_scales(w_RC, h_C, G, grid, torch.float32)
    assert (zero_RG is None) == symmetric
    for r in range(R):
        for g in range(G):
            part = slice(g * K, (g + 1) * K)
            values_K, h_K = w_RC[r, part], h_C[part]
            zero = None if zero_RG is None else float(zero_RG[r, g])
            found = error(values_K, float(scale_RG[r, g]), zero, grid, h_K)
            assert found == pytest.approx(searched(values_K, grid, h_K), rel=1e-4)


@pytest.mark.parametrize("elements", [1, 40, 10_000])
def test_pieces_of_a_weight_do_not_matter(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid("int", 3)
    whole = weighted_scales(weight(2), curvature(2), G, grid, torch.bfloat16)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", elements)
    parts = weighted_scales(weight(2), curvature(2), G, grid, torch.bfloat16)
    assert torch.equal(whole[0], parts[0])


@pytest.mark.parametrize("symmetric", [True, False])
def test_problems_and_rows_are_independent(symmetric: bool) -> None:
    grid = Grid("int", 3, symmetric)
    w_PRC, h_PC = weight(4), curvature(4)
    together = weighted_scales(w_PRC, h_PC, G, grid, torch.bfloat16)
    for p in range(4):
        for r in range(R):
            alone = weighted_scales(w_PRC[p, r : r + 1], h_PC[p], G, grid, torch.bfloat16)
            for all_PRG, own_1G in zip(together, alone, strict=True):
                assert (all_PRG is None) == (own_1G is None)
                if all_PRG is not None and own_1G is not None:
                    assert torch.equal(all_PRG[p, r : r + 1], own_1G)


def test_columns_that_do_not_count_are_cut_off() -> None:
    """The largest value of a group has no weight: the scale is that of the others."""
    w_1C = torch.tensor([[*[0.3, -0.3] * 7, 0.0, 0.9]])
    h_C = torch.ones(16)
    h_C[-1] = 0
    scale_11, _ = weighted_scales(w_1C, h_C, 1, Grid("int", 2), torch.float32)
    assert float(scale_11) == pytest.approx(0.3, rel=0.06)


def test_scales_are_those_of_the_file_and_never_zero() -> None:
    w_RC = weight()
    w_RC[0] = 0
    scale_RG, _ = weighted_scales(w_RC, curvature(), G, Grid("int", 4), torch.bfloat16)
    assert torch.equal(scale_RG, scale_RG.bfloat16().float())
    assert bool((scale_RG > 0).all())
