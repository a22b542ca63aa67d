# SPDX-License-Identifier: Apache-2.0
"""Streaming histograms are exact; the ranges taken from them are those of the data."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.histogram import (
    Histogram,
    entropy_range,
    mse_range,
    percentile_range,
)
from llmcompressor.numerics.scales import scales_from_range


def same(a: Histogram, b: Histogram) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("counts", "exponent", "low", "high")
    )


def rounding_error(x_N: Tensor, low: Tensor, high: Tensor, grid: Grid) -> float:
    scale, zero = scales_from_range(low, high, grid)
    rounded = grid.fake_quantize(x_N, scale, None if grid.symmetric else zero)
    return float((rounded - x_N).square().mean())


def test_bins_hold_the_values_that_lie_in_them():
    torch.manual_seed(0)
    values = torch.cat([torch.randn(2, 300), torch.tensor([[0.0, -4.0], [2.0, 0.25]])], 1)
    histogram = Histogram.of(values, bins=16)
    for s, row in enumerate(values):
        width = 2.0 ** histogram.exponent[s].item()
        expected = [0] * 32
        for x in row.tolist():
            expected[math.floor(x / width) + 16] += 1
        assert histogram.counts[s].tolist() == expected
    assert torch.equal(histogram.low, values.amin(1))
    assert torch.equal(histogram.high, values.amax(1))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False), min_size=1, max_size=6
        ),
        min_size=2,
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_neither_order_nor_split_matters(parts, random):
    whole = Histogram.of(torch.tensor([[x for part in parts for x in part]]), bins=8)
    random.shuffle(parts)
    streamed = Histogram.of(torch.tensor([parts[0]]), bins=8)
    for part in parts[1:]:
        streamed = streamed.add(torch.tensor([part]))
    assert same(whole, streamed)
    assert int(whole.counts.sum()) == sum(len(part) for part in parts)


def test_rows_with_different_ranges_are_independent():
    torch.manual_seed(1)
    values = torch.randn(3, 1000) * torch.tensor([[1e-3], [1.0], [1e3]])
    together = Histogram.of(values[:, :400]).add(values[:, 400:])
    for s in range(3):
        alone = Histogram.of(values[s : s + 1])
        assert torch.equal(together.counts[s], alone.counts[0])


@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.0, 99.9])
def test_percentiles_are_those_of_the_data(percentile):
    torch.manual_seed(0)
    values = torch.randn(2, 20_000) ** 3
    histogram = Histogram.of(values)
    width, level = histogram.width[:, None], percentile / 100

    def lies_at(level: float, values: Tensor, bound: Tensor) -> bool:
        below = (values < bound[:, None] - width).double().mean(1)
        not_above = (values <= bound[:, None] + width).double().mean(1)
        return bool((below <= level).all() & (not_above >= level).all())

    low, high = percentile_range(histogram, percentile, symmetric=True)
    assert torch.equal(low, -high)
    assert lies_at(level, values.abs(), high)
    low, high = percentile_range(histogram, percentile, symmetric=False)
    assert lies_at((1 - level) / 2, values, low)
    assert lies_at((1 + level) / 2, values, high)


@pytest.mark.parametrize(
    "grid", [Grid("int", 4), Grid("int", 8), Grid("int", 4, symmetric=False)], ids=str
)
def test_the_mse_range_is_about_the_best_there_is(grid):
    torch.manual_seed(0)
    values = torch.randn(1, 20_000)
    values[0, 0] = 12.0
    low, high = (bound[0] for bound in mse_range(Histogram.of(values), grid))
    found = rounding_error(values[0], low, high, grid)
    ends = values.min(), values.max()
    best = min(
        rounding_error(values[0], p * ends[0], p * ends[1], grid)
        for p in torch.linspace(0.01, 1, 300)
    )
    assert found <= best * 1.02
    assert found < 0.95 * rounding_error(values[0], *ends, grid)


@pytest.mark.parametrize("grid", [Grid("int", 8), Grid("int", 8, symmetric=False)], ids=str)
def test_the_entropy_range_cuts_a_few_outliers_and_nothing_else(grid):
    torch.manual_seed(0)
    values = torch.randn(2, 50_000)
    values[0, :5] = 100.0
    histogram = Histogram.of(values)
    _, high = entropy_range(histogram, grid)
    assert 3 < high[0] < 50
    assert 3 < high[1] <= values[1].max()


@pytest.mark.parametrize("method", [mse_range, entropy_range])
@pytest.mark.parametrize("grid", [Grid("int", 4), Grid("int", 8, symmetric=False)], ids=str)
def test_scales_do_not_influence_each_other(method, grid):
    torch.manual_seed(4)
    values = torch.randn(3, 2000) * torch.tensor([[0.01], [1.0], [50.0]])
    low, high = method(Histogram.of(values, bins=512), grid)
    for s in range(3):
        alone = method(Histogram.of(values[s : s + 1], bins=512), grid)
        assert (low[s], high[s]) == (alone[0][0], alone[1][0])


def tried_ranges(values: Tensor, least: float) -> list[tuple[Tensor, Tensor]]:
    """The ranges of the search: 160 bounds on magnitudes, each a share of the greatest."""
    low, high = values.min().clamp(max=0), values.max().clamp(min=0)
    greatest = torch.maximum(-low, high)
    shares = torch.logspace(0, math.log2(least), 160, base=2.0)
    return [(torch.maximum(-p * greatest, low), torch.minimum(p * greatest, high)) for p in shares]


def rounded_centers(
    histogram: Histogram, low: Tensor, high: Tensor, grid: Grid
) -> tuple[list[int], list[float], list[float]]:
    """Counts, centres and rounded centres of one histogram."""
    scale, zero = scales_from_range(low, high, grid)
    centers = histogram.centers[0]
    rounded = grid.fake_quantize(centers, scale, None if grid.symmetric else zero)
    return histogram.counts[0].tolist(), centers.tolist(), rounded.tolist()


def squared_error(histogram: Histogram, low: Tensor, high: Tensor, grid: Grid) -> float:
    counts, centers, rounded = rounded_centers(histogram, low, high, grid)
    return sum(n * (c - r) ** 2 for n, c, r in zip(counts, centers, rounded, strict=True))


def divergence(histogram: Histogram, low: Tensor, high: Tensor, grid: Grid) -> float:
    """KL(P || Q) bin by bin, as Migacz (2017) describes it."""
    counts, _, rounded = rounded_centers(histogram, low, high, grid)
    bins, width = histogram.bins, float(histogram.width)
    first = max(math.floor(float(low) / width), -bins) + bins
    last = min(math.floor(float(high) / width), bins - 1) + bins
    within = range(first, last + 1)
    p = [counts[b] for b in within]
    p[0] += sum(counts[:first])
    p[-1] += sum(counts[last + 1 :])
    codes: dict[float, list[int]] = {}
    for b in within:
        codes.setdefault(rounded[b], []).append(b)
    q = dict.fromkeys(within, 0.0)
    for members in codes.values():
        filled = [b for b in members if counts[b]]
        for b in filled:
            q[b] = sum(counts[b] for b in members) / len(filled)
    total = max(sum(q.values()), 1.0)
    spread = [(1 - 1e-4) * q[b] / total + 1e-4 / len(p) for b in within]
    shares = [one / sum(p) for one in p]
    return sum(a * math.log(a / b) for a, b in zip(shares, spread, strict=True) if a)


@pytest.mark.parametrize("grid", [Grid("int", 3), Grid("int", 4, symmetric=False)], ids=str)
@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_ranges_are_the_best_of_all_that_a_loop_tries(grid: Grid, shift: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(1, 3000) + shift
    values[0, :3] = torch.tensor([9.0, -7.0, 8.0])
    histogram = Histogram.of(values, bins=64)
    for method, error, least in (
        (mse_range, squared_error, 2.0**-7),
        (entropy_range, divergence, 2.0**grid.bits / 64),
    ):
        errors = [error(histogram, *ends, grid) for ends in tried_ranges(values, least)]
        found = error(histogram, *(end[0] for end in method(histogram, grid)), grid)
        assert found == pytest.approx(min(errors), rel=1e-5)
        assert found < 0.9 * errors[0]
