# SPDX-License-Identifier: Apache-2.0
"""Learned rounding: against autograd through straight-through rounding, and in limiting cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.pairs import each, pairs
from torch import Tensor

from llmcompressor.numerics.autoround import (
    RoundingParameters,
    RoundingStart,
    sign_step,
    start_at_codes,
)
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.partition import Partition, fake_quantize_matrix
from llmcompressor.numerics.scales import scales_from_range

GRIDS = [
    Grid("int", 3),
    Grid("int", 3, symmetric=False),
    Grid("int", 4, symmetric=False),
    Grid("float", 4),
    Grid("float", 8),
]
PARTITIONS = [Partition(0, 0), Partition(1, 0), Partition(1, 8), Partition(4, 8), Partition(1, 7)]


def start_of(grid: Grid, partition: Partition, *, stored: Any = torch.float32) -> RoundingStart:
    torch.manual_seed(0)
    weight_RC = torch.randn(8, 24)
    weight_RC[2] += 1.0
    scale, zero = scales_from_range(*partition.extremes(weight_RC), grid)
    # ranges that clamp some weights
    return RoundingStart(
        weight_RC, 0.8 * scale, None if grid.symmetric else zero, grid, partition, stored
    )


def moved(start: RoundingStart) -> RoundingParameters:
    """Offsets and factors from the inside of their bounds."""
    torch.manual_seed(1)
    rounding = RoundingParameters.of(start)
    rounding.offset_RC.uniform_(-0.4, 0.4)
    rounding.high.uniform_(0.7, 0.95)
    rounding.low.uniform_(0.7, 0.95)
    return rounding


def through(values: Tensor, rounded: Tensor) -> Tensor:
    return values + (rounded - values).detach()


def limited(x: Tensor, grid: Grid) -> Tensor:
    """Clamped; the ends of the range are within it, about which releases of torch disagree."""
    inside = (x >= grid.qmin) & (x <= grid.qmax)
    return torch.where(inside, x, x.detach().clamp(grid.qmin, grid.qmax))


def textbook(start: RoundingStart, rounding: RoundingParameters) -> Tensor:
    """The formula of the module's page, for autograd."""
    grid = start.grid
    if start.zero is None:
        scale, zero_RC = start.scale * rounding.high, torch.zeros(())
    else:
        least = (grid.qmin - start.zero.float()) * start.scale * rounding.low
        greatest = (grid.qmax - start.zero.float()) * start.scale * rounding.high
        scale = (greatest - least) / (grid.qmax - grid.qmin)
        zero = grid.qmin - least / scale
        zero_RC = start.expand(through(zero, zero.clamp(grid.qmin, grid.qmax).round()))
    scale_RC = start.expand(scale)
    wide_RC = start.weight_RC / scale_RC
    spacing_RC = torch.ones_like(wide_RC)
    if grid.kind == "float":
        mantissa, smallest = (3, 2.0**-6) if grid.bits == 8 else (1, 1.0)
        power_RC = wide_RC.detach().abs().clamp(smallest, grid.qmax).log2().floor()
        spacing_RC = 2.0 ** (power_RC - mantissa)
    free_RC = wide_RC + rounding.offset_RC * spacing_RC
    if grid.kind == "int":
        level_RC = through(free_RC, free_RC.round())
        return scale_RC * (limited(level_RC + zero_RC, grid) - zero_RC)
    limited_RC = limited(free_RC, grid)
    return scale_RC * through(limited_RC, grid.round(limited_RC.detach()))


@each(partition=PARTITIONS, grid=GRIDS)
def test_values_and_gradients_are_those_of_the_textbook(grid: Grid, partition: Partition) -> None:
    start = start_of(grid, partition)
    rounding = moved(start)
    leaves = [rounding.offset_RC, rounding.high, rounding.low]
    for leaf in leaves:
        leaf.requires_grad_()
    wanted_RC = textbook(start, rounding)
    by_weight_RC = torch.randn(wanted_RC.shape)
    wanted = torch.autograd.grad(wanted_RC, leaves, by_weight_RC, allow_unused=True)
    with torch.no_grad():
        rounded = rounding.apply(start)
        found = rounded.gradients(start, by_weight_RC, rounding)
    assert not rounded.inside_RC.all()
    torch.testing.assert_close(rounded.values, wanted_RC.detach())
    for one, other in zip((found.offset_RC, found.high, found.low), wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pairs(dtype=[torch.float32, torch.bfloat16], partition=PARTITIONS, grid=GRIDS)
def test_at_the_start_it_rounds_to_nearest(
    grid: Grid, partition: Partition, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight_RC = torch.randn(8, 24).to(dtype)
    scale, zero = scales_from_range(*partition.extremes(weight_RC), grid)
    kept = None if grid.symmetric else zero
    start = RoundingStart(weight_RC, scale, kept, grid, partition, dtype)
    rounding = RoundingParameters.of(start)
    found_scale, found_zero = rounding.parameters(start)
    assert torch.equal(found_scale, scale.float())
    assert found_zero is None if kept is None else torch.equal(found_zero, zero.float())
    wanted_RC = fake_quantize_matrix(weight_RC.float(), scale.float(), kept, grid, partition)
    torch.testing.assert_close(rounding.apply(start).values, wanted_RC)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_no_weight_moves_further_than_one_step(grid: Grid) -> None:
    """An offset of half a step reaches the other neighbour, and nothing beyond it."""
    start = start_of(grid, Partition(1, 8))
    nearest = RoundingParameters.of(start).apply(start)
    rounding = RoundingParameters.of(start)
    for sign in (-1, 1):
        rounding.offset_RC.fill_(sign * 0.5)
        level_RC = rounding.apply(start).level_RC
        assert not torch.equal(level_RC, nearest.level_RC)
        spacing_RC = 1.0 if nearest.spacing_RC is None else nearest.spacing_RC
        error_RC = (level_RC - nearest.wide_RC).abs() / spacing_RC
        assert (error_RC[nearest.inside_RC] <= (1.0 if grid.kind == "int" else 1.51)).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_it_finds_roundings_that_rounding_to_nearest_does_not(symmetric: bool) -> None:
    """The textbook problem, outputs for correlated inputs, by a whole descent."""
    torch.manual_seed(0)
    columns, iters = 256, 100
    inputs_TC = torch.randn(512, columns) @ (torch.eye(columns) + 0.3 * torch.randn(256, columns))
    weight_RC, partition = torch.randn(16, columns), Partition(1, 32)
    grid = Grid("int", 3, symmetric)
    scale, zero = scales_from_range(*partition.extremes(weight_RC), grid)
    kept = None if symmetric else zero
    start = RoundingStart(weight_RC, scale, kept, grid, partition, torch.float32)
    rounding, losses = RoundingParameters.of(start), []
    for step in range(iters):
        rounded = rounding.apply(start)
        error_TR = inputs_TC @ (rounded.values - weight_RC).T
        losses.append(float(error_TR.square().mean()))
        found = rounded.gradients(start, error_TR.T @ inputs_TC, rounding)
        sign_step(rounding, found, rate=(1 - step / iters) / iters)
    assert min(losses) < (0.75 if symmetric else 0.9) * losses[0]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_pruned_weights_stay_zero(grid: Grid) -> None:
    torch.manual_seed(0)
    weight_RC, partition = torch.randn(8, 24), Partition(1, 8)
    weight_RC[:, ::2] = 0
    scale, zero = scales_from_range(*partition.extremes(weight_RC), grid)
    kept = None if grid.symmetric else zero
    start = RoundingStart(weight_RC, scale, kept, grid, partition, torch.float32)
    rounding = RoundingParameters.of(start)
    for _ in range(5):
        found = rounding.apply(start).gradients(start, torch.randn(8, 24), rounding)
        sign_step(rounding, found, rate=0.4)
    values_RC = rounding.apply(start).values
    assert (values_RC[:, ::2] == 0).all()
    assert (values_RC[:, 1::2] != 0).float().mean() > 0.5


@each(grid=GRIDS, partition=PARTITIONS)
def test_a_start_within_is_rounded_to_its_codes(grid: Grid, partition: Partition) -> None:
    """Whatever is wanted: near, far away, at the ends of the grid, or no number at all."""
    start = start_of(grid, partition)
    torch.manual_seed(3)
    codes = RoundingParameters.of(start).apply(replace(start, weight_RC=3 * torch.randn(8, 24)))
    scale_RC = start.expand(start.scale)
    wanted_RC = codes.values + 2 * torch.randn(8, 24) * scale_RC
    wanted_RC[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    found = start_at_codes(start, codes.values, wanted_RC)
    rounded = RoundingParameters.of(found).apply(found)
    assert torch.equal(rounded.level_RC, codes.level_RC)
    assert found.weight_RC.isfinite().all()
    spacing = 1.0 if rounded.spacing_RC is None else rounded.spacing_RC
    away_RC = (found.weight_RC - codes.values).abs()
    assert (away_RC <= 0.51 * spacing * scale_RC).all()
    # each comes as near as half a step allows: on the side that was wanted
    assert ((found.weight_RC - codes.values) * (wanted_RC - codes.values) >= 0)[1:].all()
