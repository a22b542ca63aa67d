# SPDX-License-Identifier: Apache-2.0
"""Codes found in pieces are those of the whole, packed as compressed-tensors packs them."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from llmcompressor.checkpoint import packing as module
from llmcompressor.checkpoint.packing import compute_codes
from llmcompressor.errors import InputError
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.packing import can_pack, pack_integers
from llmcompressor.numerics.partition import Partition, quantize_matrix

PARTITIONS = [
    Partition(0, 0),
    Partition(1, 0),
    Partition(1, 32),
    Partition(16, 32),
    Partition(7, 9),
]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize(("with_zero", "rows"), [(False, 5), (True, 113)])
def test_pieces_give_the_codes_of_the_whole(
    partition: Partition, with_zero: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ELEMENTS", 300)
    torch.manual_seed(0)
    grid = Grid("int", 4, symmetric=not with_zero)
    weight = torch.randn(rows, 96).to(torch.bfloat16)
    shape = partition.shape(rows, 96)
    scale = (torch.rand(shape) * 0.2 + 0.1).to(torch.bfloat16)
    zero = torch.randint(-4, 4, shape, dtype=torch.int8) if with_zero else None
    found = compute_codes(
        weight, scale, zero, grid.limit, partition, lambda one: one.round().to(torch.int8)
    )
    whole = quantize_matrix(weight, scale, zero, grid, partition).to(torch.int8)
    assert torch.equal(found, whole)


def test_packed_as_compressed_tensors_packs() -> None:
    for bits, columns in ((4, 8), (8, 8), (4, 96), (8, 32)):
        half = 2 ** (bits - 1)
        codes = torch.randint(-half, half, (17, columns), dtype=torch.int8)
        assert torch.equal(pack_integers(codes, bits), pack_to_int32(codes, bits))
    for columns, bits in ((12, 4), (32, 3), (6, 8)):  # they fill no words
        assert not can_pack(columns, bits)
        with pytest.raises(InputError):
            pack_integers(torch.zeros(2, columns, dtype=torch.int8), bits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_to_8_bit_floats_as_the_grid_does(dtype: torch.dtype) -> None:
    """For every value of 16 bits; so what is stored is cast, and not rounded before."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    grid = Grid("float", 8)
    values = values[values.isfinite()].clamp(grid.qmin, grid.qmax)
    rounded = grid.round(values)
    cast = values.to(torch.float8_e4m3fn)
    assert torch.equal(cast.to(dtype), rounded)
    assert torch.equal(cast.view(torch.int8), rounded.to(torch.float8_e4m3fn).view(torch.int8))
