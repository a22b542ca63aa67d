# SPDX-License-Identifier: Apache-2.0
"""Scales with frozen codes: gradients by differences, codes that stay, steps of Adam."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.partition import Partition, dequantize_matrix, quantize_matrix
from llmcompressor.numerics.scale_tuning import AdamState, CodedWeight

ROWS, COLUMNS = 12, 64
PARTITIONS = {
    "tensor": Partition(0, 0),
    "channel": Partition(1, 0),
    "group": Partition(1, 16),
    "ragged": Partition(1, 24),
    "block": Partition(4, 16),
}
GRIDS = {
    "2 bits": Grid("int", 2),
    "4 bits": Grid("int", 4),
    "8 bits": Grid("int", 8),
    "4 bits, asymmetric": Grid("int", 4, symmetric=False),
    "8 bits, asymmetric": Grid("int", 8, symmetric=False),
    "fp8": Grid("float", 8),
}


def coded(grid: Grid, partition: Partition, dtype: torch.dtype, *, seed: int = 0) -> CodedWeight:
    """A random weight as it is decoded."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    shape = partition.shape(ROWS, COLUMNS)
    scale = ((0.5 + torch.rand(shape, generator=generator)) * 3 / grid.qmax).to(dtype)
    zero = None
    if not grid.symmetric:
        zero = torch.randint(-3, 4, shape, generator=generator).to(torch.int8)
    codes = quantize_matrix(weight.float(), scale.float(), zero, grid, partition)
    values = dequantize_matrix(codes, scale, zero, grid, partition).to(dtype)
    return CodedWeight(values, scale, zero, grid, partition)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("grid", ["4 bits", "4 bits, asymmetric", "fp8"])
def test_gradients_are_those_of_differences(partition: str, grid: str) -> None:
    one = coded(GRIDS[grid], PARTITIONS[partition], torch.float32)
    towards = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))

    def loss(offset: Tensor) -> Tensor:
        return (one.decoded(offset) * towards).double().sum()

    offset = torch.zeros(one.scale.shape, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(offset), offset)
    step = 1e-2
    for place in range(0, offset.numel(), 7):
        moved = torch.zeros(offset.numel())
        moved[place] = step
        moved = moved.view(offset.shape)
        slope = (loss(moved) - loss(-moved)) / (2 * step)
        assert gradient.flatten()[place] == pytest.approx(float(slope), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("grid", GRIDS)
def test_codes_stay_when_scales_move(grid: str, partition: str, dtype: torch.dtype) -> None:
    one = coded(GRIDS[grid], PARTITIONS[partition], dtype)
    offset = torch.empty(one.scale.shape).uniform_(
        -0.2, 0.2, generator=torch.Generator().manual_seed(2)
    )
    moved = one.with_scale_at(offset)
    assert torch.equal(moved.codes(), one.codes())
    read = dequantize_matrix(one.codes(), moved.scale, one.zero, one.grid, one.partition)
    has_moved = one.partition.expand(moved.scale != one.scale, ROWS, COLUMNS)
    expected = torch.where(has_moved, read.to(dtype), one.weight)
    assert torch.equal(moved.weight, expected)
    assert moved.scale.dtype == one.scale.dtype
    assert (moved.scale != one.scale).float().mean() > 0.8


@pytest.mark.parametrize("grid", GRIDS)
def test_no_offset_changes_nothing(grid: str) -> None:
    one = coded(GRIDS[grid], PARTITIONS["group"], torch.bfloat16)
    same = one.with_scale_at(torch.zeros(one.scale.shape))
    assert torch.equal(same.scale, one.scale)
    assert torch.equal(same.weight, one.weight)
    assert torch.equal(one.decoded(torch.zeros(one.scale.shape)), one.weight)


def test_steps_are_those_of_torch() -> None:
    start = torch.randn(5, generator=torch.Generator().manual_seed(0))
    other = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([other], lr=1.0, betas=(0.9, 0.95), eps=1e-12)
    state = AdamState.of(start.clone())
    for number in range(1, 6):
        gradient = torch.sin(number + torch.arange(5.0))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / number
        other.grad = gradient.clone()
        optimizer.step()
        state.step(gradient, 0.1 / number, number)
    torch.testing.assert_close(state.value, other.detach())
