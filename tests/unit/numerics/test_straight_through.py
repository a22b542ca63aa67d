# SPDX-License-Identifier: Apache-2.0
"""The forward is that of the grid; gradients are those of the straight-through definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pairs import each
from torch import Tensor

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.partition import Partition, fake_quantize_matrix
from llmcompressor.numerics.scales import ScaleFormat, scales_from_range
from llmcompressor.numerics.straight_through import (
    fake_quantize,
    learned_scale,
    storable_scale,
)
from llmcompressor.numerics.straight_through import fake_quantize_matrix as fake_matrix

GRIDS = {
    "int4": Grid("int", 4),
    "int8": Grid("int", 8),
    "int4 asymmetric": Grid("int", 4, symmetric=False),
    "int3 asymmetric": Grid("int", 3, symmetric=False),
    "fp8": Grid("float", 8),
    "fp4": Grid("float", 4),
}
PARTITIONS = {
    "tensor": Partition(0, 0),
    "channel": Partition(1, 0),
    "group": Partition(1, 4),
    "ragged group": Partition(1, 5),
    "block": Partition(2, 4),
    "ragged block": Partition(4, 5),
}


def matrix(seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(6, 12, dtype=torch.float64)


def clipping_scales(x: Tensor, grid: Grid, partition: Partition) -> tuple[Tensor, Tensor | None]:
    """Scales of which some values lie outside: of ranges that are too small by a quarter."""
    low, high = partition.extremes(x)
    scale, zero = scales_from_range(0.75 * low, 0.75 * high, grid)
    return scale, None if grid.symmetric else zero


def surrogate(
    x: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid, partition: Partition
) -> Callable[[Tensor, Tensor], Tensor]:
    """The straight-through definition as a differentiable function of values and scales."""
    wide_zero = 0.0 if zero is None else partition.expand(zero, *x.shape).double()

    def limited(values: Tensor, scales: Tensor) -> Tensor:
        wide = partition.expand(scales, *values.shape)
        return (values / wide + wide_zero).clamp(grid.qmin, grid.qmax)

    added = grid.round(limited(x, scale)) - limited(x, scale)
    return lambda values, scales: (
        (limited(values, scales) + added - wide_zero) * partition.expand(scales, *values.shape)
    )


def differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """Central finite differences of a sum, element by element."""
    found = torch.zeros_like(at)
    for index in range(at.numel()):
        up, down = at.clone(), at.clone()
        up.view(-1)[index] += step
        down.view(-1)[index] -= step
        found.view(-1)[index] = (function(up) - function(down)) / (2 * step)
    return found


@each(partition=PARTITIONS.values(), grid=GRIDS.values())
def test_gradients_are_those_of_the_definition(grid: Grid, partition: Partition) -> None:
    x = matrix()
    scale, zero = clipping_scales(x, grid, partition)
    weights = matrix(1)
    definition = surrogate(x, scale, zero, grid, partition)

    values, steps = x.clone().requires_grad_(), scale.clone().requires_grad_()
    result = fake_matrix(values, steps, zero, grid, partition, gradient_scale=0.5)
    (result * weights).sum().backward()
    assert torch.allclose(result, definition(x, scale), atol=1e-12)
    of_values = differences(lambda one: (definition(one, scale) * weights).sum(), x)
    of_scales = differences(lambda one: (definition(x, one) * weights).sum(), scale)
    assert values.grad is not None
    assert steps.grad is not None
    assert torch.allclose(values.grad, of_values, atol=1e-5)
    assert torch.allclose(steps.grad, 0.5 * of_scales, atol=1e-5)
    assert (values.grad == 0).any()
    assert (values.grad != 0).any()


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_a_constant_scale_leaves_values_the_same_gradient(grid: Grid) -> None:
    x, partition = matrix(), Partition(1, 4)
    scale, zero = clipping_scales(x, grid, partition)
    gradients = []
    for learned in (False, True):
        values = x.clone().requires_grad_()
        steps = scale.clone().requires_grad_(learned)
        (fake_matrix(values, steps, zero, grid, partition) * matrix(1)).sum().backward()
        gradients.append(values.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


@each(dtype=[torch.float32, torch.bfloat16, torch.float16], grid=GRIDS.values())
def test_the_forward_is_that_of_the_grid_in_every_bit(grid: Grid, dtype: torch.dtype) -> None:
    x, partition = matrix().to(dtype), Partition(1, 4)
    scale, zero = clipping_scales(x, grid, partition)
    expected = fake_quantize_matrix(x, scale, zero, grid, partition)
    for values_learn, scale_learns in ((False, False), (True, False), (True, True), (False, True)):
        values = x.clone().requires_grad_(values_learn)
        steps = scale.clone().requires_grad_(scale_learns)
        found = fake_matrix(values, steps, zero, grid, partition)
        assert found.dtype is dtype
        assert torch.equal(found, expected)
        assert found.requires_grad == (values_learn or scale_learns)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8),
    scale=st.floats(2**-10, 10, width=32),
    zero=st.integers(-8, 7),
)
def test_zeros_stay_zeros(values: list[float], scale: float, zero: int) -> None:
    x = torch.tensor([0.0, -0.0, *values], requires_grad=True)
    for grid in GRIDS.values():
        shift = None if grid.symmetric else torch.tensor(zero).clamp(grid.qmin, grid.qmax)
        found = fake_quantize(x, torch.tensor(scale), shift, grid)
        assert (found[:2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_extreme_of_a_float_range_counts_as_inside(dtype: torch.dtype) -> None:
    """x / (max / 448) may come out above 448."""
    torch.manual_seed(0)
    x = torch.randn(500, 8, dtype=dtype).requires_grad_()
    fake_quantize(
        x, x.detach().abs().amax(1, keepdim=True) / 448, None, Grid("float", 8)
    ).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))  # type: ignore[arg-type]


def test_a_frozen_weight_gets_no_gradient_and_keeps_nothing() -> None:
    found = fake_quantize(torch.randn(3), torch.tensor(0.1), None, Grid("int", 4))
    assert found.grad_fn is None


@pytest.mark.parametrize("p", [-80.0, -1.0, 0.0, 5.0])
def test_a_learned_scale_is_positive_and_first_what_was_observed(p: float) -> None:
    start = torch.tensor([1e-3, 0.3])
    scale = learned_scale(torch.full((2,), p), start)
    assert (scale > 0).all()
    assert p != 0 or torch.equal(scale, start)


@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_what_is_stored_is_stored_as_it_is_and_passes_gradients(scale_format: ScaleFormat) -> None:
    torch.manual_seed(0)
    shared = torch.tensor([37.0]) if scale_format is ScaleFormat.E4M3 else None
    scale = torch.rand(9).add(0.1).requires_grad_()
    stored = storable_scale(scale, scale_format, global_scale=shared, dtype=torch.float32)
    stored.sum().backward()
    assert scale.grad is not None
    assert torch.allclose(scale.grad, torch.full((9,), 1.0 if shared is None else 37.0))
    again = storable_scale(
        stored.detach() / (1.0 if shared is None else shared),
        scale_format,
        global_scale=shared,
        dtype=torch.float32,
    )
    assert torch.equal(again, stored)
    if scale_format is ScaleFormat.E8M0:
        assert torch.equal(stored.log2(), stored.log2().round())
    if scale_format is ScaleFormat.E4M3:
        assert torch.equal(stored, stored.to(torch.float8_e4m3fn).float())
