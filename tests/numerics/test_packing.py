# SPDX-License-Identifier: Apache-2.0
"""Packing 4-bit floats, against compressed-tensors."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.packing import pack_e2m1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_equal_those_of_compressed_tensors(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(33, 64, generator=generator) * 4
    edges = torch.tensor([0.0, -0.0, 0.5, -0.5, 1, 1.5, 2, 3, 4, 6, -6, 99, -99, 0.25, 5, -5])
    values = Grid("float", 4).round(torch.cat([noise.flatten(), edges]).reshape(-1, 16).to(dtype))
    packed = pack_e2m1(values)
    assert packed.dtype is torch.uint8
    assert torch.equal(packed, pack_fp4_to_uint8(values + 0.0))  # a zero without a sign
    decoded = unpack_fp4_from_uint8(packed, *values.shape)
    assert torch.equal(decoded.to(dtype), values)
