# SPDX-License-Identifier: Apache-2.0
"""Scales that are fitted again: never worse, and the best where that can be computed directly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.gptq import ColumnScales, refit_scales

ROWS, COLUMNS = 6, 24


def problem(groups: int, *, zero: bool = False, seed: int = 0) -> tuple[Tensor, ...]:
    """W, Q, H and scales: codes of 3 bits at scales that are too large."""
    generator = torch.Generator().manual_seed(seed)
    weight_RC = torch.randn(ROWS, COLUMNS, generator=generator)
    inputs_TC = torch.randn(64, COLUMNS, generator=generator) @ torch.randn(
        COLUMNS, COLUMNS, generator=generator
    )
    group_C = torch.arange(COLUMNS) // (COLUMNS // groups)
    scale_RG = weight_RC.abs().view(ROWS, groups, -1).amax(-1) / 2.5
    zero_RG = torch.full((ROWS, groups), 1.0) if zero else None
    shift = 1.0 if zero else 0.0
    codes_RC = (weight_RC / scale_RG[:, group_C] + shift).round().clamp(-4, 3) - shift
    scales = ColumnScales(scale_RG, zero_RG, group_C)
    return weight_RC, codes_RC * scale_RG[:, group_C], inputs_TC.T @ inputs_TC, scales


def loss(weight_RC: Tensor, found_RC: Tensor, hessian_CC: Tensor) -> Tensor:
    change_RC = (found_RC - weight_RC).double()
    return 0.5 * ((change_RC @ hessian_CC.double()) * change_RC).sum(-1)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 24])
def test_no_row_is_worse_and_the_change_is_the_one_told(groups: int, zero: bool) -> None:
    weight_RC, rounded_RC, hessian_CC, scales = problem(groups, zero=zero)
    scale_RG, found_RC, saved_R = refit_scales(
        weight_RC, rounded_RC, hessian_CC, scales, stored=torch.float32
    )
    before_R = loss(weight_RC, rounded_RC, hessian_CC)
    after_R = loss(weight_RC, found_RC, hessian_CC)
    assert bool((after_R < before_R).all())
    torch.testing.assert_close(saved_R.double(), after_R - before_R, rtol=1e-3, atol=1e-3)
    codes_RC = rounded_RC / scales.scale_RG[:, scales.group_of_column_C]
    torch.testing.assert_close(found_RC, codes_RC * scale_RG[:, scales.group_of_column_C])


def test_one_group_gets_the_least_squares_solution() -> None:
    weight_RC, rounded_RC, hessian_CC, scales = problem(1)
    scale_RG, *_ = refit_scales(weight_RC, rounded_RC, hessian_CC, scales, stored=torch.float32)
    codes_RC = rounded_RC / scales.scale_RG
    for row in range(ROWS):
        v_C, w_C = codes_RC[row].double(), weight_RC[row].double()
        best = (v_C @ hessian_CC.double() @ w_C) / (v_C @ hessian_CC.double() @ v_C)
        assert float(scale_RG[row, 0]) == pytest.approx(float(best), rel=1e-4)
