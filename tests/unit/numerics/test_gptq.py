# SPDX-License-Identifier: Apache-2.0
"""The column sweep is the textbook elimination, however it is cut into blocks and batches."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from tests.support.pairs import each, pairs
from torch import Tensor

from llmcompressor.numerics.gptq import (
    ColumnScales,
    activation_order,
    coordinate_descent,
    sweep,
    sweep_and_refine,
)
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.hessian import damp, factorize_with_rising_dampening, upper_factor
from llmcompressor.numerics.partition import Partition
from llmcompressor.numerics.scales import scales_from_range

R, C = 16, 64
PARTITIONS = {
    "tensor": Partition(0, 0),
    "channel": Partition(1, 0),
    "group": Partition(1, 16),
    "block": Partition(8, 16),
    "ragged block": Partition(5, 24),
}
GRIDS = {
    "int4": Grid("int", 4),
    "int4 asymmetric": Grid("int", 4, symmetric=False),
    "int2": Grid("int", 2),
    "int8 asymmetric": Grid("int", 8, symmetric=False),
    "fp8": Grid("float", 8),
    "fp8 asymmetric": Grid("float", 8, symmetric=False),
    "fp4": Grid("float", 4),
}
SHARE_KEPT = 0.5
"""At most this share of the output error of rounding to nearest is left on such inputs."""


class Case(NamedTuple):
    weight_RC: Tensor
    hessian_CC: Tensor
    scales: ColumnScales
    grid: Grid

    def factor(self) -> Tensor:
        return upper_factor(self.hessian_CC.double()).float()


def case(partition: str = "group", grid: str = "int4", seed: int = 0) -> Case:
    """A random weight, strongly correlated inputs (damped), and min-max scales."""
    torch.manual_seed(seed)
    weight_RC = torch.randn(R, C) + 0.3
    mixing_CC = torch.randn(C, C) * torch.logspace(0, -1.5, C).unsqueeze(-1)
    inputs_TC = torch.randn(4 * C, C) @ mixing_CC
    hessian_CC = damp((inputs_TC.T @ inputs_TC), 0.01)
    numbers, cells = GRIDS[grid], PARTITIONS[partition]
    scale, zero = scales_from_range(*cells.extremes(weight_RC), numbers)
    scale_RG, group_C = cells.per_column(scale, R, C)
    zero_RG = None if numbers.symmetric else cells.per_column(zero, R, C)[0].float()
    return Case(weight_RC, hessian_CC, ColumnScales(scale_RG, zero_RG, group_C), numbers)


def nearest(weight_RC: Tensor, scales: ColumnScales, grid: Grid) -> Tensor:
    """Every element rounded by itself, in the dtype of the weight."""
    scale_RC = scales.scale_RG[:, scales.group_of_column_C].to(weight_RC.dtype)
    zero_RC = 0 if scales.zero_RG is None else scales.zero_RG[:, scales.group_of_column_C]
    return (grid.round(weight_RC / scale_RC + zero_RC) - zero_RC) * scale_RC


def textbook(one: Case) -> tuple[Tensor, Tensor]:
    """Optimal brain quantization with the inverse updated explicitly, column after column."""
    weight_RC, inverse_CC = one.weight_RC.double().clone(), one.hessian_CC.double().inverse()
    rounded_RC, loss_R = torch.zeros_like(weight_RC), torch.zeros(R, dtype=torch.float64)
    for c in range(C):
        rounded_R = nearest(weight_RC, one.scales, one.grid)[:, c]
        error_R = weight_RC[:, c] - rounded_R
        rounded_RC[:, c] = rounded_R
        loss_R += error_R.square() / inverse_CC[c, c] / 2
        weight_RC -= torch.outer(error_R / inverse_CC[c, c], inverse_CC[c])
        inverse_CC -= torch.outer(inverse_CC[:, c], inverse_CC[c]) / inverse_CC[c, c]
    return rounded_RC, loss_R


def equal_rows(a_RC: Tensor, b_RC: Tensor) -> float:
    """The share of equal rows. A tie that falls the other way in float32 changes one row."""
    close = torch.isclose(a_RC.double(), b_RC.double(), rtol=1e-4, atol=1e-5).all(dim=-1)
    return float(close.float().mean())


def output_error(one: Case, rounded_RC: Tensor) -> float:
    change_RC = (rounded_RC - one.weight_RC).double()
    return float(((change_RC @ one.hessian_CC.double()) * change_RC).sum())


@each(grid=GRIDS, partition=PARTITIONS)
def test_it_is_the_textbook_elimination(partition: str, grid: str) -> None:
    one = case(partition, grid)
    result = sweep(one.weight_RC, one.factor(), one.scales, one.grid)
    rounded_RC, loss_R = textbook(one)
    assert equal_rows(result.weight_RC, rounded_RC) >= 15 / 16
    assert torch.allclose(result.loss_R.sum().double(), loss_R.sum(), rtol=1e-2)


@each(grid=GRIDS, partition=PARTITIONS)
def test_every_weight_lands_on_its_grid(partition: str, grid: str) -> None:
    one = case(partition, grid)
    rounded_RC = sweep(one.weight_RC, one.factor(), one.scales, one.grid).weight_RC
    assert torch.allclose(nearest(rounded_RC, one.scales, one.grid), rounded_RC, rtol=1e-6)


@pytest.mark.parametrize("grid", ["int4", "fp4"])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_outputs_are_closer_than_by_rounding_to_nearest(partition: str, grid: str) -> None:
    gptq = plain = 0.0
    for seed in range(3):
        one = case(partition, grid, seed)
        result = sweep(one.weight_RC, one.factor(), one.scales, one.grid)
        gptq += output_error(one, result.weight_RC)
        plain += output_error(one, nearest(one.weight_RC, one.scales, one.grid))
    assert gptq < SHARE_KEPT * plain


@pytest.mark.parametrize("grid", GRIDS)
def test_the_loss_is_half_the_error_of_the_outputs(grid: str) -> None:
    one = case("group", grid)
    result = sweep(one.weight_RC, one.factor(), one.scales, one.grid)
    assert float(result.loss_R.sum()) == pytest.approx(
        output_error(one, result.weight_RC) / 2, rel=1e-3
    )


@pytest.mark.parametrize(("block", "strip"), [(1, 1), (7, 3), (16, 16), (64, 5), (1000, 1000)])
@pytest.mark.parametrize("batched", [False, True])
def test_blocks_and_strips_do_not_show(block: int, strip: int, batched: bool) -> None:
    one = case("channel", "int4 asymmetric")
    scales = one.scales
    weight, factor = one.weight_RC, one.factor()
    if batched:
        weight, factor = weight.unsqueeze(0), factor.unsqueeze(0)
        assert scales.zero_RG is not None
        scales = ColumnScales(
            scales.scale_RG.unsqueeze(0), scales.zero_RG.unsqueeze(0), scales.group_of_column_C
        )
    whole = sweep(one.weight_RC, one.factor(), one.scales, one.grid)
    cut = sweep(weight, factor, scales, one.grid, block=block, strip=strip)
    assert cut.weight_RC.shape == weight.shape
    assert equal_rows(cut.weight_RC.reshape(R, C), whole.weight_RC) >= 15 / 16
    assert torch.allclose(cut.loss_R.sum(), whole.loss_R.sum(), rtol=1e-2)


@each(grid=GRIDS, partition=PARTITIONS)
def test_uncorrelated_inputs_leave_plain_rounding(partition: str, grid: str) -> None:
    one = case(partition, grid)
    result = sweep(one.weight_RC, torch.eye(C), one.scales, one.grid)
    plain_RC = nearest(one.weight_RC, one.scales, one.grid)
    # The extreme of a symmetric group lies half way between two codes: either one is nearest.
    off_RC, least_RC = ((w - one.weight_RC).abs() for w in (result.weight_RC, plain_RC))
    assert torch.allclose(off_RC, least_RC, rtol=1e-6, atol=1e-6)
    assert float((result.weight_RC != plain_RC).float().mean()) < 0.05


def test_a_dead_column_takes_part_in_nothing() -> None:
    one = case()
    one.hessian_CC[9], one.hessian_CC[:, 9] = 0, 0
    hessian_CC = damp(one.hessian_CC, 0.0)
    result = sweep(one.weight_RC, upper_factor(hessian_CC), one.scales, one.grid)
    other_RC = one.weight_RC.clone()
    other_RC[:, 9] = 0
    without = sweep(other_RC, upper_factor(hessian_CC), one.scales, one.grid)
    rest = [c for c in range(C) if c != 9]
    assert torch.equal(result.weight_RC[:, rest], without.weight_RC[:, rest])
    assert not without.weight_RC[:, 9].any()


def test_batches_are_swept_as_if_alone() -> None:
    cases = [case("group", "int4 asymmetric", seed) for seed in range(3)]
    stacked = ColumnScales(
        torch.stack([one.scales.scale_RG for one in cases]),
        torch.stack([one.scales.zero_RG for one in cases if one.scales.zero_RG is not None]),
        cases[0].scales.group_of_column_C,
    )
    together = sweep(
        torch.stack([one.weight_RC for one in cases]),
        torch.stack([one.factor() for one in cases]),
        stacked,
        cases[0].grid,
    )
    for one, weight_RC, loss_R in zip(cases, *together, strict=True):
        alone = sweep(one.weight_RC, one.factor(), one.scales, one.grid)
        assert equal_rows(weight_RC, alone.weight_RC) >= 15 / 16
        assert torch.allclose(loss_R.sum(), alone.loss_R.sum(), rtol=1e-2)


@pytest.mark.parametrize("batched", [False, True])
def test_an_order_is_that_of_a_weight_whose_columns_were_moved(batched: bool) -> None:
    one = case("channel", "int4 asymmetric")
    order_C = activation_order(one.hessian_CC)
    assert order_C.tolist() != list(range(C))
    hessian_CC = one.hessian_CC[order_C][:, order_C]
    factor_CC = upper_factor(hessian_CC.double()).float()
    moved = sweep(one.weight_RC[:, order_C], factor_CC, one.scales, one.grid)
    expected_RC = torch.empty_like(moved.weight_RC)
    expected_RC[:, order_C] = moved.weight_RC
    weight, scales = one.weight_RC, one.scales
    if batched:
        assert scales.zero_RG is not None
        weight, factor_CC, order_C = weight[None], factor_CC[None], order_C[None]
        scales = ColumnScales(scales.scale_RG[None], scales.zero_RG[None], scales.group_of_column_C)
    result = sweep(weight, factor_CC, scales, one.grid, order_C=order_C)
    assert equal_rows(result.weight_RC.reshape(R, C), expected_RC) >= (15 / 16 if batched else 1)
    assert torch.allclose(result.loss_R.sum(), moved.loss_R.sum(), rtol=1e-2)


DAMPENING = 0.05


def damped(hessian_CC: Tensor, dampening: float = DAMPENING) -> Tensor:
    """H + λI in float64; a dead column gets λ alone."""
    H_CC = hessian_CC.double()
    return H_CC + dampening * H_CC.diagonal().mean() * torch.eye(C, dtype=torch.float64)


def textbook_descent(one: Case, rounded_RC: Tensor) -> Tensor:
    """Each column set to its best, the error of all others computed anew: float64, no blocks."""
    H_CC, weight_RC, found_RC = damped(one.hessian_CC), one.weight_RC.double(), rounded_RC.double()
    for c in range(C):
        gradient_R = (found_RC - weight_RC) @ H_CC[:, c]
        wanted_RC = found_RC.clone()
        wanted_RC[:, c] -= gradient_R / H_CC[c, c]
        found_RC[:, c] = nearest(wanted_RC, one.scales, one.grid)[:, c]
    return found_RC


def row_errors(one: Case, rounded_RC: Tensor, dampening: float = DAMPENING) -> Tensor:
    change_RC = rounded_RC.double() - one.weight_RC.double()
    return ((change_RC @ damped(one.hessian_CC, dampening)) * change_RC).sum(dim=-1)


def descended(one: Case, rounded_RC: Tensor, **changes: int) -> Tensor:
    """What a descent makes of it."""
    return coordinate_descent(
        one.weight_RC,
        rounded_RC,
        one.hessian_CC,
        one.scales,
        one.grid,
        dampening=DAMPENING,
        **changes,
    ).weight_RC


@each(grid=GRIDS, partition=PARTITIONS)
def test_a_descent_lowers_each_row_s_error_on_the_grid(partition: str, grid: str) -> None:
    one = case(partition, grid)
    rounded_RC = sweep(one.weight_RC, one.factor(), one.scales, one.grid).weight_RC
    for start_RC in (rounded_RC, nearest(one.weight_RC, one.scales, one.grid)):
        found_RC = descended(one, start_RC)
        before_R, after_R = row_errors(one, start_RC), row_errors(one, found_RC)
        assert bool((after_R <= before_R * (1 + 1e-5) + 1e-6).all())
        assert torch.allclose(nearest(found_RC, one.scales, one.grid), found_RC, rtol=1e-5)
    assert float(after_R.sum()) < float(before_R.sum())  # rounding to nearest leaves room


@each(block=[1, 16, 24, 128], grid=["int4", "int4 asymmetric", "fp4"])
def test_it_is_the_textbook_descent_however_it_is_cut(grid: str, block: int) -> None:
    one = case("group", grid)
    start_RC = nearest(one.weight_RC, one.scales, one.grid)
    found_RC = descended(one, start_RC, block=block)
    assert equal_rows(found_RC, textbook_descent(one, start_RC)) >= 15 / 16
    assert equal_rows(found_RC, start_RC) < 0.5


@pairs(grid=["int4", "int4 asymmetric", "fp8"], ordered=[False, True], rounds=[0, 1, 2])
def test_turned_once_it_is_the_sweep_and_then_the_descents(
    grid: str, ordered: bool, rounds: int
) -> None:
    one = case(grid=grid)
    kept_RC = torch.rand(R, C) > 0.3
    order_C = activation_order(one.hessian_CC) if ordered else None
    found, dampening = sweep_and_refine(
        one.weight_RC,
        one.hessian_CC,
        one.scales,
        one.grid,
        dampening=0.02,
        rounds=rounds,
        order_C=order_C,
        kept_RC=kept_RC,
    )
    factor_CC, expected_dampening = factorize_with_rising_dampening(
        one.hessian_CC, 0.02, order_C=order_C
    )
    scales = one.scales
    if order_C is not None:
        scales = scales._replace(group_of_column_C=scales.group_of_column_C[order_C])
    expected_RC, loss_R = sweep(
        one.weight_RC, factor_CC, scales, one.grid, order_C=order_C, kept_RC=kept_RC
    )
    for _ in range(rounds):
        expected_RC, change_R = coordinate_descent(
            one.weight_RC,
            expected_RC,
            one.hessian_CC,
            one.scales,
            one.grid,
            dampening=0.02,
            kept_RC=kept_RC,
        )
        loss_R = loss_R + change_R
    assert dampening == expected_dampening
    assert torch.equal(found.weight_RC, expected_RC)
    torch.testing.assert_close(found.loss_R, loss_R)
    assert not bool(found.weight_RC[~kept_RC].any())
