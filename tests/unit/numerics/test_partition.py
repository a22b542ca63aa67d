# SPDX-License-Identifier: Apache-2.0
"""Cutting matrices into cells, against loops; rounding by cells, against compressed-tensors."""

from __future__ import annotations

import math

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from tests.support.pairs import each, pairs

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.partition import (
    Partition,
    dequantize_matrix,
    fake_quantize_matrix,
    quantize_matrix,
)
from llmcompressor.numerics.scales import effective_scale

PARTITIONS = [
    Partition(0, 0),
    Partition(1, 0),
    Partition(1, 4),
    Partition(1, 5),
    Partition(1, 64),
    Partition(2, 3),
    Partition(4, 4),
    Partition(64, 64),
    Partition(0, 4),
]
SHAPES = [(6, 12), (1, 1), (5, 7), (3, 8)]


def cell_of(partition: Partition, R: int, C: int, r: int, c: int) -> tuple[int, int]:
    return r // (partition.rows or R), c // (partition.columns or C)


def members(partition: Partition, matrix: torch.Tensor) -> dict[tuple[int, int], list[float]]:
    """The elements of each cell, by loops."""
    R, C = matrix.shape
    result: dict[tuple[int, int], list[float]] = {}
    for r in range(R):
        for c in range(C):
            result.setdefault(cell_of(partition, R, C, r, c), []).append(matrix[r, c].item())
    return result


@each(shape=SHAPES, partition=PARTITIONS)
def test_extremes_and_cells_hold_just_the_elements(partition, shape):
    matrix = torch.randn(shape) + 5  # all positive: padding would show
    expected = members(partition, matrix)
    low, high = partition.extremes(matrix)
    assert low.shape == high.shape == partition.shape(*shape)
    assert low.flatten().tolist() == [min(values) for values in expected.values()]
    assert high.flatten().tolist() == [max(values) for values in expected.values()]
    cells = partition.cells(matrix, fill=-1.0)
    assert math.prod(cells.shape[:2]) == len(expected)
    for row, values in zip(cells.flatten(0, 1).tolist(), expected.values(), strict=True):
        assert [x for x in row if x != -1.0] == values


@pairs(
    dtype=[torch.bfloat16, torch.float16], partition=PARTITIONS, shift=[-5.0, -1.0, 0.0, 1.0, 5.0]
)
def test_extremes_of_narrow_floats_are_those_of_wide_ones(partition, dtype, shift):
    matrix = (torch.randn(2, 6, 8) + shift).to(dtype)  # cells of one sign and of both
    matrix[0, 0, :4] = torch.tensor([0.0, -0.0, 1.0, torch.inf])
    matrix[1, 2] = -0.0
    for narrow, wide in zip(
        partition.extremes(matrix), partition.extremes(matrix.float()), strict=True
    ):
        assert torch.equal(narrow.float(), wide)


@each(shape=SHAPES, partition=PARTITIONS)
def test_each_element_and_each_column_finds_its_scale(partition, shape):
    R, C = shape
    scale = torch.arange(math.prod(partition.shape(R, C))).reshape(partition.shape(R, C)) + 1.0
    by_cell = dict(
        zip(members(partition, torch.zeros(shape)), scale.flatten().tolist(), strict=True)
    )
    expanded = partition.expand(scale, R, C)
    scale_RG, group_of_column_C = partition.per_column(scale, R, C)
    assert expanded.shape == shape
    assert scale_RG.shape[0] == R
    assert group_of_column_C.dtype == torch.int64
    for r in range(R):
        for c in range(C):
            expected = by_cell[cell_of(partition, R, C, r, c)]
            assert expanded[r, c] == expected
            assert scale_RG[r, group_of_column_C[c]] == expected


CT_CASES = [
    {"num_bits": 8, "strategy": "tensor"},
    {"num_bits": 8, "strategy": "channel"},
    {"num_bits": 8, "strategy": "channel", "symmetric": False},
    {"num_bits": 4, "group_size": 16},
    {"num_bits": 3, "group_size": 32, "symmetric": False},
    {"num_bits": 8, "type": "float", "strategy": "tensor"},
    {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": False},
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 16]},
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [7, 30]},
    {"num_bits": 4, "strategy": "block", "block_structure": [128, 128], "symmetric": False},
    {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": torch.uint8},
    {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": torch.float8_e4m3fn,
    },
]


def partition_for(args: QuantizationArgs) -> Partition:
    if args.block_structure:
        return Partition(*args.block_structure)
    if args.group_size:
        return Partition(1, args.group_size)
    return Partition(0, 0) if args.strategy == "tensor" else Partition(1, 0)


@each(dtype=[torch.bfloat16, torch.float16, torch.float32], fields=CT_CASES)
def test_rounding_by_cells_equals_that_of_readers_in_every_bit(fields, dtype):
    torch.manual_seed(0)
    args = QuantizationArgs(**fields)
    grid = Grid("int" if args.type == "int" else "float", args.num_bits, args.symmetric)
    partition = partition_for(args)
    W = (torch.randn(24, 64) / 10).to(dtype)
    W[1, ::2], W[2], W[3, 5] = -0.0, W[2] * 1e-6, 4.0
    if args.symmetric or args.type == "int":  # readers get NaN for the zero point of zeros
        W[0] = 0.0
    global_scale = torch.tensor([700.0]) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(*partition.extremes(W), args, global_scale=global_scale)
    zero = None if args.symmetric else zero
    effective = effective_scale(scale, global_scale)
    W.view(-1)[-1:] = 0.5 * effective.to(dtype).flatten()[-1:]  # a tie

    codes = quantize_matrix(W, effective, zero, grid, partition)
    their_codes = quantize(W, scale, zero, args, global_scale=global_scale)
    assert torch.equal(codes.to(their_codes.dtype), their_codes)
    values = dequantize_matrix(codes, effective, zero, grid, partition)
    their_values = dequantize(codes, scale, zero, args, global_scale=global_scale)
    assert torch.equal(values.to(their_values.dtype), their_values)
    ours = fake_quantize_matrix(W, effective, zero, grid, partition)
    theirs = fake_quantize(W, scale, zero, args, global_scale=global_scale).to(dtype)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours.signbit(), theirs.signbit())
