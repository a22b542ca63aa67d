# SPDX-License-Identifier: Apache-2.0
"""The sweep itself, whatever decides its columns: against least squares, and cut anyhow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.column_sweep import (
    Block,
    DecideColumn,
    column_ops,
    columns_first,
    restore_column_order,
    rows_first,
    sweep_columns_,
)
from llmcompressor.numerics.hessian import upper_factor

R, C = 5, 21


def problem(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight ``[R, C]``, and a positive definite H."""
    torch.manual_seed(seed)
    inputs_TC = torch.randn(60, C) @ torch.randn(C, C)
    return torch.randn(R, C), inputs_TC.T @ inputs_TC / 60 + 0.1 * torch.eye(C)


def swept(
    weight_RC: Tensor, hessian_CC: Tensor, *, block: int = 8, strip: int = 3
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Q, losses, what each column was before its turn, and what each block saw ahead of it."""
    work_CR = columns_first(weight_RC, None)
    ops = column_ops(work_CR, by_torch=True)
    before: list[Tensor] = []
    ahead: list[Tensor] = []

    def enter(entered: Block) -> DecideColumn:
        ahead.append(entered.lookahead(slice(0, entered.now_BR.shape[-2])))

        def decide(w_R: Tensor, b: int, out_R: Tensor) -> None:
            before.append(w_R.clone())
            torch.round(w_R, out=out_R)

        return decide

    factor_CC = upper_factor(hessian_CC.double()).float()
    decided_CR, loss_R = sweep_columns_(work_CR, factor_CC, enter, ops, block=block, strip=strip)
    assert torch.allclose(work_CR, decided_CR - weight_RC.mT)
    return rows_first(decided_CR, None), loss_R, before, ahead


def best_rest(weight_RC: Tensor, hessian_CC: Tensor, decided_RK: Tensor) -> Tensor:
    """All columns from the K-th on: the best, given the K that are decided. Least squares."""
    known = decided_RK.shape[1]
    change_RK = decided_RK.double() - weight_RC[:, :known].double()
    wide_CC = hessian_CC.double()
    moved = torch.linalg.solve(wide_CC[known:, known:], wide_CC[known:, :known] @ change_RK.T).T
    return weight_RC[:, known:].double() - moved


@pytest.mark.parametrize(("block", "strip"), [(C, C), (8, 3), (1, 1), (5, 16), (100, 2)])
def test_the_first_undecided_column_is_the_best_there_is(block: int, strip: int) -> None:
    """Of all values of the later columns the best ones given those decided: the papers' form."""
    weight_RC, hessian_CC = problem()
    decided_RC, _, before, ahead = swept(weight_RC, hessian_CC, block=block, strip=strip)
    for c, was_R in enumerate(before):
        expected_RK = best_rest(weight_RC, hessian_CC, decided_RC[:, :c])
        torch.testing.assert_close(was_R.double(), expected_RK[:, 0], rtol=1e-3, atol=1e-3)
    for number, seen_BR in enumerate(ahead):
        first = number * block
        expected_RK = best_rest(weight_RC, hessian_CC, decided_RC[:, :first])
        seen_RB = seen_BR.T.double()
        torch.testing.assert_close(
            seen_RB, expected_RK[:, : seen_RB.shape[1]], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_weight_is_turned_and_turned_back(batch: tuple[int, ...], ordered: bool) -> None:
    weight_RC = torch.randn(*batch, R, C).bfloat16()
    order_C = torch.rand(*batch, C).argsort(dim=-1) if ordered else None
    work_CR = columns_first(weight_RC, order_C)
    assert work_CR.dtype is torch.float32
    places = order_C if order_C is not None else torch.arange(C).expand(*batch, C)
    for index in torch.cartesian_prod(*map(torch.arange, (*batch, C))).reshape(-1, len(batch) + 1):
        *member, c = index.tolist()
        expected_R = weight_RC[(*member, slice(None), int(places[(*member, c)]))]
        assert torch.equal(work_CR[(*member, c)], expected_R.float())
    assert torch.equal(rows_first(work_CR, order_C), weight_RC.float())
    if order_C is not None:
        assert torch.equal(restore_column_order(work_CR, order_C), weight_RC.float().mT)
