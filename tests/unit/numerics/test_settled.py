# SPDX-License-Identifier: Apache-2.0
"""What each weight is at its best, given all other codes: the least of a parabola."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.gptq import ColumnScales, conditional_optimum, coordinate_descent
from llmcompressor.numerics.grid import Grid


def problem(rows: int = 5, columns: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """W, Q in steps of 0.5, and H of inputs that go together."""
    torch.manual_seed(0)
    inputs = torch.randn(64, columns) @ torch.randn(columns, columns)
    weight_RC = torch.randn(rows, columns)
    return weight_RC, (weight_RC * 2).round() / 2, inputs.mT @ inputs


def loss(weight_RC: Tensor, rounded_RC: Tensor, hessian_CC: Tensor) -> float:
    change_RC = (rounded_RC - weight_RC).double()
    return float((change_RC @ hessian_CC.double() * change_RC).sum())


@pytest.mark.parametrize("dampening", [0.0, 0.1])
def test_no_other_value_of_one_weight_is_better(dampening: float) -> None:
    weight_RC, rounded_RC, hessian_CC = problem()
    added = dampening * hessian_CC.diagonal().mean() * torch.eye(len(hessian_CC))
    found_RC = conditional_optimum(weight_RC, rounded_RC, hessian_CC, dampening=dampening)
    for row, column in [(0, 0), (2, 7), (4, 11)]:
        least = None
        for step in (0.0, -0.01, 0.01):
            one_RC = rounded_RC.clone()
            one_RC[row, column] = found_RC[row, column] + step
            own = loss(weight_RC, one_RC, hessian_CC + added)
            least = own if least is None else least
            assert own >= least


def test_where_descent_rests_everything_rounds_to_its_own_code() -> None:
    weight_RC, rounded_RC, hessian_CC = problem()
    scales = ColumnScales(torch.full((5, 1), 0.5), None, torch.zeros(12, dtype=torch.int64))
    grid = Grid("int", 8)
    before_RC = conditional_optimum(weight_RC, rounded_RC, hessian_CC)
    assert not torch.equal((before_RC * 2).round() / 2, rounded_RC)
    for _ in range(50):
        rounded_RC = coordinate_descent(weight_RC, rounded_RC, hessian_CC, scales, grid).weight_RC
    found_RC = conditional_optimum(weight_RC, rounded_RC, hessian_CC)
    assert torch.equal((found_RC * 2).round() / 2, rounded_RC)
