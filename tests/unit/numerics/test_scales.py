# SPDX-License-Identifier: Apache-2.0
"""Scales and zero points, against compressed-tensors and against what they are for."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from tests.support.pairs import each

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.scales import (
    ScaleFormat,
    effective_scale,
    global_scale_from_amax,
    scales_from_range,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}
PLAIN = [
    {"num_bits": bits, "type": kind, "symmetric": symmetric}
    for kind, bits in [("int", 1), ("int", 3), ("int", 4), ("int", 8), ("int", 16), ("float", 8)]
    for symmetric in (True, False)
]


def ranges(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random, empty, one-sided, tiny, huge and power-of-two ranges."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 200) * torch.logspace(-7, 4, 200)
    special = torch.tensor(
        [[0, 0], [1, 2], [-2, -1], [0, 6], [-448, 448], [1e-7, 2e-7], [-3.5, 0], [1.75, 1.75]]
    ).T
    powers = 2.0 ** torch.arange(-14, 15)
    low = torch.cat([torch.minimum(a, b), special[0], -powers, -powers])
    high = torch.cat([torch.maximum(a, b), special[1], powers, powers * 1.75])
    return low.to(dtype), high.to(dtype)


def grid_of(args: QuantizationArgs) -> Grid:
    return Grid("int" if args.type == "int" else "float", args.num_bits, args.symmetric)


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.to(torch.float64), b.to(torch.float64))


@each(dtype=DTYPES, fields=PLAIN)
def test_plain_scales_equal_those_of_readers(fields, dtype):
    if fields["num_bits"] == 16 and dtype is torch.float16:
        dtype = torch.float64  # in float16, readers overflow on the number of codes, 65535
    args = QuantizationArgs(**fields)
    low, high = ranges(dtype)
    ours = scales_from_range(low, high, grid_of(args))
    scale, zero = calculate_qparams(low, high, args)
    if zero.is_floating_point():  # readers get NaN for empty ranges, which integers turn into 0
        zero = zero.float().nan_to_num(0.0).to(zero.dtype)
    assert_same(ours, (scale, zero))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_mx_scales_equal_those_of_readers(bits, dtype):
    args = QuantizationArgs(num_bits=bits, zp_dtype=torch.uint8, **MX)
    low, high = ranges(dtype)
    ours = scales_from_range(
        low, high, grid_of(args), scale_format=ScaleFormat.E8M0, zero_dtype=torch.uint8
    )
    assert_same(ours, calculate_qparams(low, high, args))
    assert bool((torch.frexp(ours[0].float()).mantissa == 0.5).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_scales_equal_those_of_readers(dtype):
    args = QuantizationArgs(**NVFP4)
    low, high = ranges(dtype)
    amax = torch.maximum(-low.min(), high.max())
    ours_global = global_scale_from_amax(amax)
    assert torch.equal(ours_global, generate_gparam(low.min(), high.max()))
    ours = scales_from_range(
        low, high, grid_of(args), scale_format=ScaleFormat.E4M3, global_scale=ours_global
    )
    assert_same(ours, calculate_qparams(low, high, args, global_scale=ours_global))
    assert torch.equal(ours[0], ours[0].to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("amax", [0.0, 1e-40, 1.0, 3e38, float("nan")])
def test_global_scales_of_extreme_tensors_are_finite(amax):
    theirs = generate_gparam(-torch.tensor(amax), torch.tensor(amax))
    ours = global_scale_from_amax(torch.tensor(amax))
    assert ours.shape == (1,)
    assert torch.equal(ours, theirs)


def test_the_largest_group_scale_uses_all_of_its_format():
    group_amax = torch.tensor([0.37, 0.01])
    global_scale = global_scale_from_amax(group_amax)
    scale, _ = scales_from_range(
        -group_amax,
        group_amax,
        Grid("float", 4),
        scale_format=ScaleFormat.E4M3,
        global_scale=global_scale,
    )
    assert scale[0] == 448
    assert effective_scale(scale, global_scale)[0] * 6 == pytest.approx(0.37, rel=1e-6)
    assert effective_scale(scale) is scale


@pytest.mark.parametrize("grid", [Grid("int", 4), Grid("int", 8, symmetric=False)], ids=str)
def test_zero_and_the_range_survive_rounding(grid):
    low, high = ranges(torch.float32)
    scale, zero = scales_from_range(low, high, grid)
    assert not grid.fake_quantize(torch.zeros_like(low), scale, zero).any()
    for end in (low, high):
        error = (grid.fake_quantize(end, scale, zero) - end).abs()
        assert bool((error <= scale * 1.001).all())


@pytest.mark.parametrize("grid", [Grid("int", 4, symmetric=False), Grid("int", 8, symmetric=False)])
def test_a_range_beyond_its_dtype_has_a_scale(grid):
    ends = torch.tensor([-6e4, -5.0]), torch.tensor([5e4, 6e4])
    scale, zero = scales_from_range(*(end.half() for end in ends), grid, stored_in=torch.float16)
    wide, wide_zero = scales_from_range(*ends, grid)
    torch.testing.assert_close(scale, wide.half(), rtol=2e-3, atol=0)
    assert torch.equal(zero, wide_zero)
