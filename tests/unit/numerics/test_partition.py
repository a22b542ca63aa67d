# SPDX-License-Identifier: Apache-2.0
"""Cutting matrices into cells, against loops; rounding by cells, against compressed-tensors."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams

from llmcompressor.errors import InputError
from llmcompressor.numerics import extremes
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("shift", [-5.0, -1.0, 0.0, 1.0, 5.0])
def test_extremes_of_narrow_floats_are_those_of_wide_ones(partition, dtype, shift):
    matrix = (torch.randn(2, 6, 8) + shift).to(dtype)  # cells of one sign and of both
    matrix[0, 0, :4] = torch.tensor([0.0, -0.0, 1.0, torch.inf])
    matrix[1, 2] = -0.0
    for narrow, wide in zip(
        partition.extremes(matrix), partition.extremes(matrix.float()), strict=True
    ):
        assert torch.equal(narrow.float(), wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_magnitudes_are_the_greater_of_the_extremes(partition, dtype):
    matrix = torch.randn(2, 6, 8).to(dtype)
    matrix[0, 0, :4] = torch.tensor([0.0, -0.0, 1.0, -torch.inf])
    low, high = partition.extremes(matrix)
    assert torch.equal(partition.magnitudes(matrix), torch.maximum(-low, high))
    matrix[1, 3, 2] = torch.nan
    assert partition.magnitudes(matrix).isnan().sum() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "partition", [Partition(1, 16), Partition(1, 64), Partition(8, 8)], ids=str
)
@pytest.mark.parametrize("at_once", [1, 200, 2**20])
def test_a_matrix_may_be_looked_at_by_parts(monkeypatch, partition, dtype, at_once):
    matrix = torch.randn(48, 128).to(dtype)
    matrix[5, 7], matrix[9, 3] = -torch.inf, 0.0
    monkeypatch.setattr(extremes, "_AT_ONCE", at_once)
    cells = partition.cells(matrix.float())
    low, high = partition.extremes(matrix)
    shape = partition.shape(48, 128)
    assert torch.equal(low.float(), cells.amin(-1).reshape(shape))
    assert torch.equal(high.float(), cells.amax(-1).reshape(shape))
    assert torch.equal(partition.magnitudes(matrix).float(), cells.abs().amax(-1).reshape(shape))


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F81, -0x40, -0x7F], ids=hex)
def test_extremes_of_narrow_floats_tell_nan(bits):
    matrix = torch.randn(4, 8).bfloat16()
    matrix.view(torch.int16)[2, 5] = bits
    low, high = Partition(1, 4).extremes(matrix)
    broken = ~(low.isfinite() & high.isfinite())
    assert broken.nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
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


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_leading_dimensions_are_carried_along(partition):
    batch = torch.randn(3, 6, 12)
    grid = Grid("int", 4)
    low, high = partition.extremes(batch)
    scale = torch.maximum(-low, high) / 7
    together = fake_quantize_matrix(batch, scale, None, grid, partition)
    scale_RG, _ = partition.per_column(scale, 6, 12)
    for i, matrix in enumerate(batch):
        assert torch.equal(low[i], partition.extremes(matrix)[0])
        assert torch.equal(
            together[i], fake_quantize_matrix(matrix, scale[i], None, grid, partition)
        )
        assert torch.equal(scale_RG[i], partition.per_column(scale[i], 6, 12)[0])
        assert torch.equal(partition.cells(batch)[i], partition.cells(matrix))


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_matrices_round_like_expanded_scales(partition, shape):
    torch.manual_seed(3)
    matrix = torch.randn(shape)
    grid = Grid("int", 4, symmetric=False)
    scale = torch.rand(partition.shape(*shape)) + 0.1
    zero = torch.randint(-3, 3, scale.shape)
    wide_scale, wide_zero = (partition.expand(t, *shape) for t in (scale, zero))
    assert torch.equal(
        fake_quantize_matrix(matrix, scale, zero, grid, partition),
        grid.fake_quantize(matrix, wide_scale, wide_zero),
    )


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fields", CT_CASES, ids=str)
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


def test_scales_of_whole_rows_are_expanded_without_copies():
    scale = torch.rand(8, 1)
    expanded = Partition(1, 0).expand(scale, 8, 100)
    assert expanded.untyped_storage().data_ptr() == scale.untyped_storage().data_ptr()


def test_groups_are_views_of_the_matrix():
    matrix = torch.randn(8, 32)
    assert Partition(1, 8).cells(matrix).data_ptr() == matrix.data_ptr()


def test_a_matrix_smaller_than_a_cell_is_one_cell():
    partition = Partition(1, 128)
    assert partition.shape(3, 20) == (3, 1)
    assert partition.divides(3, 20)


def test_a_scale_of_the_wrong_shape_is_refused():
    with pytest.raises(InputError, match=r"\(2, 2\)"):
        Partition(1, 4).expand(torch.ones(2, 3), 2, 8)


def test_negative_sizes_are_refused():
    with pytest.raises(InputError, match="-1"):
        Partition(1, -1)
