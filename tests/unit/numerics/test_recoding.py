# SPDX-License-Identifier: Apache-2.0
"""Every value that a reader can decode to has a code, and that code is found from the value."""

from __future__ import annotations

import torch
from tests.support.pairs import each
from torch import Tensor

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.packing import needs_recoding, recode

HALVES = [torch.bfloat16, torch.float16]
INTEGERS = [Grid("int", bits, symmetric) for bits in range(6, 17) for symmetric in (True, False)]
GRIDS = [*INTEGERS, Grid("float", 8, symmetric=False)]
ROWS = 48


def codes_of_all(grid: Grid) -> Tensor:
    """Codes from end to end, in float32: all of a small grid, 4096 and the ends of a large one."""
    if grid.kind == "float":
        members = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        return members[members.isfinite()]
    return torch.linspace(grid.qmin, grid.qmax, min(2**grid.bits, 4096)).round()


def zeros_of(grid: Grid) -> Tensor | None:
    if grid.symmetric:
        return None
    drawn = torch.rand(ROWS, 1) * (grid.qmax - grid.qmin) * 0.9 + grid.qmin * 0.9
    zero = grid.round(drawn)
    return zero.to(torch.float8_e4m3fn if grid.kind == "float" else torch.int16)


def decoded(grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Codes [R, C], their scale and zero point, and the values that readers make of them."""
    torch.manual_seed(grid.bits)
    codes = codes_of_all(grid).expand(ROWS, -1)
    scale = (torch.rand(ROWS, 1) * 1e-3 + 1e-3).to(dtype)
    zero = zeros_of(grid)
    return codes, scale, zero, grid.dequantize(codes, scale, zero)


@each(dtype=HALVES, grid=GRIDS)
def test_values_are_found_again(grid: Grid, dtype: torch.dtype) -> None:
    _, scale, zero, values = decoded(grid, dtype)
    found = recode(values, scale, zero, grid)
    assert found.dtype is torch.float32
    assert torch.equal(found, grid.round(found)), "members of the grid"
    assert torch.equal(grid.dequantize(found, scale, zero), values)


@each(dtype=[*HALVES, torch.float32], grid=GRIDS)
def test_a_division_alone_is_enough_where_no_code_is_looked_for(
    grid: Grid, dtype: torch.dtype
) -> None:
    if needs_recoding(grid, dtype):
        return
    _, scale, zero, values = decoded(grid, dtype)
    found = grid.quantize(values.float(), scale.float(), zero)
    assert torch.equal(grid.dequantize(found, scale, zero), values)


def test_a_division_alone_misses_codes_in_half_precision() -> None:
    """What the search is for: without it other values are stored."""
    for grid in (Grid("int", 8, symmetric=False), Grid("int", 9), Grid("int", 16)):
        _, scale, zero, values = decoded(grid, torch.bfloat16)
        found = grid.quantize(values.float(), scale.float(), zero)
        assert not torch.equal(grid.dequantize(found, scale, zero), values)
