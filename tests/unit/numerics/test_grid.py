# SPDX-License-Identifier: Apache-2.0
"""Rounding to grids: every 16-bit number against compressed-tensors, and a slow textbook."""

from __future__ import annotations

import itertools

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize, quantize
from compressed_tensors.quantization.quant_args import round_to_quantized_type_args
from tests.support.pairs import each, pairs

from llmcompressor.errors import InputError
from llmcompressor.numerics.grid import Grid, float_layout
from llmcompressor.schemes.presets import can_store_6_bit_floats

FLOATS = [Grid("float", bits) for bits in (8, 6, 4)]
GRIDS = [*(Grid("int", bits) for bits in range(1, 9)), *FLOATS]
READ = [grid for grid in GRIDS if grid != Grid("float", 6) or can_store_6_bit_floats()]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, but for which NaN it is."""
    assert a.dtype == b.dtype
    nan = a.isnan()
    integer = float_layout(a.dtype).integer
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(integer), b[~nan].view(integer))


def reference_round(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    args = QuantizationArgs(num_bits=grid.bits, type=grid.kind)
    ends = torch.tensor(grid.qmin), torch.tensor(grid.qmax)
    return round_to_quantized_type_args(x.clone(), args, *ends)


def members(grid: Grid) -> list[float]:
    """All members that are not negative, in the order of their codes."""
    if grid.kind == "int":
        return [float(i) for i in range(int(grid.qmax) + 1)]
    mantissa, bias, count = {8: (3, 7, 127), 6: (3, 1, 32), 4: (1, 1, 8)}[grid.bits]
    result = []
    for code in range(count):
        exponent, fraction = divmod(code, 2**mantissa)
        significand = fraction / 2**mantissa + (exponent > 0)
        result.append(significand * 2.0 ** (max(exponent, 1) - bias))
    return result


@each(grid=READ, dtype=[torch.bfloat16, torch.float16])
def test_every_16_bit_number_rounds_as_readers_round_it(grid, dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert same_bits(grid.round(x), reference_round(x, grid))


@pytest.mark.parametrize("grid", [Grid("int", 4), *FLOATS], ids=str)
def test_the_nearest_member_is_taken_ties_go_to_the_even_code(grid):
    table = members(grid)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    for x in [*table, *middles, *torch.rand(200).mul(grid.qmax).tolist()]:
        code = min(range(len(table)), key=lambda c: (abs(table[c] - x), c % 2))
        assert grid.round(torch.tensor([x], dtype=torch.float64)).item() == table[code]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rounding_is_idempotent_and_leaves_its_argument_alone(grid):
    x = torch.randn(1000) * 4
    before = x.clone()
    once = grid.round(x)
    assert torch.equal(grid.round(once), once)
    assert torch.equal(x, before)
    assert once.min() >= grid.qmin
    assert once.max() <= grid.qmax


@pairs(
    x_dtype=DTYPES,
    scale_dtype=DTYPES,
    with_zero=[False, True],
    grid=[Grid("int", 8, symmetric=False), Grid("float", 8, False)],
)
def test_mixed_dtypes_are_computed_as_readers_do(grid, x_dtype, scale_dtype, with_zero):
    torch.manual_seed(1)
    args = QuantizationArgs(num_bits=8, type=grid.kind, symmetric=False, strategy="channel")
    x = (torch.randn(16, 40) * 3).to(x_dtype)
    scale = (torch.rand(16, 1) / 20 + 0.01).to(scale_dtype)
    zero = torch.randint(-9, 9, (16, 1)).to(args.zp_dtype) if with_zero else None
    codes = grid.quantize(x, scale, zero)
    assert same_bits(codes, quantize(x, scale, zero, args))
    assert same_bits(grid.dequantize(codes, scale, zero), dequantize(codes, scale, zero, args))
    ours = grid.fake_quantize(x, scale, zero)
    assert ours.dtype == x_dtype
    assert same_bits(ours, fake_quantize(x, scale, zero, args).to(x_dtype))


@pytest.mark.parametrize("kind_bits", [("int", 0), ("int", 17), ("float", 5), ("text", 4)])
def test_grids_that_do_not_exist_are_refused(kind_bits):
    with pytest.raises(InputError, match="no grid"):
        Grid(*kind_bits)


def test_the_members_of_e2m3_are_those_of_the_specification():
    """OCP Microscaling Formats v1.0, table 5: bias 1, subnormals 0.125 to 0.875, up to 7.5."""
    eighths = [k / 8 for k in range(17)]  # 0, the subnormals, and the binade from 1 to 2
    expected = [*eighths, *(2 + k / 4 for k in range(1, 9)), *(4 + k / 2 for k in range(1, 8))]
    grid = Grid("float", 6)
    assert len(expected) == 32
    assert sorted(set(grid.round(torch.linspace(0, 9, 9001)).tolist())) == expected
    signed = torch.tensor([-0.0, -0.01, 0.01])
    assert grid.round(signed).signbit().tolist() == [True, True, False]
