# SPDX-License-Identifier: Apache-2.0
"""Half-quadratic quantization, against loops, in limiting cases, and against min-max scales."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.pairs import each
from torch import Tensor

from llmcompressor.errors import InputError
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.hqq import HalfQuadratic, lp_error, refine_cells
from llmcompressor.numerics.scales import scales_from_range

GRIDS = [Grid("int", bits, symmetric) for bits in (2, 3, 4) for symmetric in (True, False)]


def started(values_SN: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    scale_S, zero_S = scales_from_range(values_SN.amin(1), values_SN.amax(1), grid)
    return scale_S, None if grid.symmetric else zero_S


def error_of(cell: list[float], scale: float, zero: int, grid: Grid, norm: float) -> float:
    total = 0.0
    for w in cell:
        code = round(min(max(w / scale + zero, grid.qmin), grid.qmax))
        total += abs((code - zero) * scale - w) ** norm
    return total


def textbook(
    cell: list[float], scale: float, zero: int, grid: Grid, search: HalfQuadratic
) -> tuple[float, int]:
    """One element after another, in double precision."""
    best = (error_of(cell, scale, zero, grid, search.norm), scale, zero)
    beta = search.beta
    for _ in range(search.iterations):
        codes, targets = [], []
        for w in cell:
            code = round(min(max(w / scale + zero, grid.qmin), grid.qmax))
            error = w / scale - (code - zero)
            shrunk = max(abs(error) - abs(error) ** (search.norm - 1) / beta, 0.0) if error else 0.0
            codes.append(code)
            targets.append(w / scale - math.copysign(shrunk, error))
        if not grid.symmetric:
            moved = sum(code - target for code, target in zip(codes, targets, strict=True))
            zero = round(min(max(moved / len(cell), grid.qmin), grid.qmax))
        top = sum(t * (code - zero) for code, t in zip(codes, targets, strict=True))
        bottom = sum((code - zero) ** 2 for code in codes)
        if bottom and top > 0:
            scale *= top / bottom
        best = min(best, (error_of(cell, scale, zero, grid, search.norm), scale, zero))
        beta *= search.kappa
    return best[1], best[2]


@pytest.fixture
def values() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(8, 32)
    x[1] = x[1] ** 3
    x[2].abs_()
    x[3] += 1.5
    x[4, 0] = 20
    return x


@each(grid=GRIDS, search=[HalfQuadratic(), HalfQuadratic(1.0, 1.0, 1.1, 7)])
def test_it_is_the_textbook_loop(values: Tensor, grid: Grid, search: HalfQuadratic) -> None:
    scale_S, zero_S = started(values, grid)
    found_S, found_zero_S = refine_cells(values, scale_S, zero_S, grid, search)
    for s, cell in enumerate(values.tolist()):
        zero = 0 if zero_S is None else int(zero_S[s])
        wanted, wanted_zero = textbook(cell, float(scale_S[s]), zero, grid, search)
        least = error_of(cell, wanted, wanted_zero, grid, search.norm)
        found, found_zero = float(found_S[s]), 0 if found_zero_S is None else int(found_zero_S[s])
        assert error_of(cell, found, found_zero, grid, search.norm) == pytest.approx(
            least, rel=1e-4
        )
        if search.norm < 1:  # at 1 many scales have one error: which is least is rounding's choice
            assert (found, found_zero) == (pytest.approx(wanted, rel=1e-4), wanted_zero)


@each(dtype=[torch.float32, torch.bfloat16], grid=GRIDS)
def test_no_cell_gets_worse_and_most_get_better(
    values: Tensor, grid: Grid, dtype: torch.dtype
) -> None:
    values = torch.cat([values, torch.randn(64, 32)]).to(dtype)
    scale_S, zero_S = started(values, grid)
    found_S, found_zero_S = refine_cells(values, scale_S, zero_S, grid, HalfQuadratic())
    before = lp_error(values, scale_S, zero_S, grid, 0.7)
    after = lp_error(values, found_S, found_zero_S, grid, 0.7)
    assert (after <= before).all()
    assert after.sum() < {2: 0.93, 3: 0.97, 4: 0.98}[grid.bits] * before.sum()
    assert found_S.dtype == dtype
    assert found_zero_S is None or found_zero_S.dtype == torch.int8


def test_a_small_norm_gives_outliers_up() -> None:
    """One weight far out: min-max spreads the grid over it, the lp error lets it be clamped."""
    torch.manual_seed(0)
    values = torch.randn(16, 128)
    values[:, 0] = 8.0
    grid = Grid("int", 3, symmetric=False)
    scale_S, zero_S = started(values, grid)
    found_S, found_zero_S = refine_cells(values, scale_S, zero_S, grid, HalfQuadratic())
    assert found_S.mean() < 0.9 * scale_S.mean()
    after = lp_error(values, found_S, found_zero_S, grid, 0.7).sum()
    assert after < 0.85 * lp_error(values, scale_S, zero_S, grid, 0.7).sum()


@pytest.mark.parametrize(
    "wrong",
    [{"norm": 0.0}, {"norm": 1.5}, {"beta": 0.0}, {"kappa": 0.9}, {"iterations": -1}],
    ids=str,
)
def test_wrong_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        HalfQuadratic(**wrong)  # type: ignore[arg-type]  # a number for a number


@each(norm=[0.4, 0.7, 1.0], grid=GRIDS)
def test_the_error_is_that_of_a_loop(values: Tensor, grid: Grid, norm: float) -> None:
    scale_S, zero_S = started(values, grid)
    found_S = lp_error(values, scale_S, zero_S, grid, norm)
    zeros = [0] * len(values) if zero_S is None else zero_S.tolist()
    for cell, scale, zero, found in zip(
        values.tolist(), scale_S.tolist(), zeros, found_S.tolist(), strict=True
    ):
        expected = error_of(cell, scale, int(zero), grid, norm)
        slack = 4 * 1e-7**norm  # an extreme may be off by a rounding of float32
        assert found == pytest.approx(expected, rel=1e-4, abs=slack)
