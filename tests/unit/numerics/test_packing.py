# SPDX-License-Identifier: Apache-2.0
"""Rounding to floats of 4 and 6 bits and packing them, against compressed-tensors and a table."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

from llmcompressor.numerics.grid import Grid, float_layout
from llmcompressor.numerics.packing import pack_e2m1, pack_e2m3, pack_integers
from llmcompressor.schemes.presets import can_store_6_bit_floats, preset_scheme


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_equal_those_of_compressed_tensors(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(33, 64, generator=generator) * 4
    edges = torch.tensor([0.0, -0.0, 0.5, -0.5, 1, 1.5, 2, 3, 4, 6, -6, 99, -99, 0.25, 5, -5])
    values = Grid("float", 4).round(torch.cat([noise.flatten(), edges]).reshape(-1, 16).to(dtype))
    packed = pack_e2m1(values.clone())
    assert packed.dtype is torch.uint8
    assert torch.equal(packed, pack_fp4_to_uint8(values + 0.0))  # a zero without a sign
    decoded = unpack_fp4_from_uint8(packed, *values.shape)
    assert torch.equal(decoded.to(dtype), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounds_as_the_grid_does_beside_every_tie(dtype: torch.dtype) -> None:
    grid, layout = Grid("float", 4), float_layout(dtype)
    ties = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], dtype=dtype)
    bits = ties.view(layout.integer)[:, None] + torch.arange(-2, 3).to(layout.integer)
    near = bits.clamp(min=0).view(dtype).clamp(max=6.0)
    x = torch.cat([near, -near], -1)
    expected = pack_fp4_to_uint8(grid.round(x).float() + 0.0)
    assert torch.equal(pack_e2m1(x.clone()), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_the_codes_from_their_lowest_bit_on(bits: int) -> None:
    """Each code, made positive by half of the range, takes the next bits of its row's words."""
    half, generator = 2 ** (bits - 1), torch.Generator().manual_seed(0)
    codes = torch.randint(-half, half, (5, 32), generator=generator, dtype=torch.int8)
    codes[0, :2] = torch.tensor([-half, half - 1])
    for row, words in zip(codes.tolist(), pack_integers(codes, bits).tolist(), strict=True):
        stream = sum((code + half) << (bits * place) for place, code in enumerate(row))
        expected = [stream >> (32 * word) & 0xFFFFFFFF for word in range(len(words))]
        assert [word & 0xFFFFFFFF for word in words] == expected


MEMBERS_OF_SIX = [
    *(k / 8 for k in range(16)),
    *(2 + k / 4 for k in range(8)),
    *(4 + k / 2 for k in range(8)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_four_values_of_six_bits_fill_three_bytes(dtype: torch.dtype) -> None:
    """Every member, every tie and its neighbours, and random numbers, by a slow textbook."""
    layout = float_layout(dtype)
    values = torch.tensor(MEMBERS_OF_SIX)
    edges = torch.cat([values, (values[1:] + values[:-1]) / 2]).to(dtype)
    bits = edges.view(layout.integer)[:, None] + torch.arange(-2, 3).to(layout.integer)
    near = bits.clamp(min=0).view(dtype).clamp(max=7.5)
    noise = torch.randn(126, 5, generator=torch.Generator().manual_seed(0)).mul(3).clamp(-7.5, 7.5)
    x = torch.cat([near, -near, noise.to(dtype)]).flatten()
    x = x[: len(x) // 28 * 28].reshape(7, -1)

    def code(value: float) -> int:
        """The nearest member, of two the one with an even code; zero has a sign too."""
        size = abs(value)
        nearest = min(range(32), key=lambda one: (abs(MEMBERS_OF_SIX[one] - size), one % 2))
        return nearest | (32 if math.copysign(1, value) < 0 else 0)

    for row, packed in zip(x.tolist(), pack_e2m3(x.clone()).tolist(), strict=True):
        stream = sum(code(value) << (6 * place) for place, value in enumerate(row))
        assert bytes(packed) == stream.to_bytes(len(row) * 6 // 8, "little")


@pytest.mark.skipif(
    not can_store_6_bit_floats(), reason="this compressed-tensors has no 6-bit floats"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_six_bits_equal_those_of_compressed_tensors(dtype: torch.dtype) -> None:
    compressor = BaseCompressor.get_value_from_registry("mxfp6-pack-quantized")
    scheme = preset_scheme("MXFP6A16")
    weight = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    weight[0, :2] = torch.tensor([0.0, -0.0])
    own = {"weight": weight, "weight_scale": torch.ones(33, 2, dtype=dtype)}
    theirs = compressor.compress(dict(own), scheme)
    packed = pack_e2m3(weight.clamp(-7.5, 7.5))
    assert torch.equal(packed, theirs["weight_packed"])
    decoded = compressor.decompress(theirs, scheme)["weight"]
    assert torch.equal(decoded.to(dtype), Grid("float", 6).round(weight))
