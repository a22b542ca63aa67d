# SPDX-License-Identifier: Apache-2.0
r"""SparseGPT: zero weights column by column, and move each error onto the columns still to come.

Frantar & Alistarh, arXiv:2301.00774, Alg. 1. For a weight W and inputs with Hessian ``H = XᵀX`` it
lowers ``tr((Q − W) H (Q − W)ᵀ)`` over the Q with zeros in the places that it chooses on the way.
With R upper triangular and ``R Rᵀ = H``, removing the weight w of column c costs, once the columns
before it are decided (R_cc is 1 / U_cc of the paper, ``UᵀU = H⁻¹``),

.. math:: \varepsilon = w^2 R_{cc}^2 .

Zeros anywhere: when a block of columns begins, the fraction of it with the least ε is removed. N:M:
when a group of M columns begins, the N of each row with the least ε are removed; w is then the
column given that none of the earlier ones of the group is removed. A removed weight becomes zero
when its column is reached, and the later columns compensate for it as in GPTQ
(:mod:`llmcompressor.numerics.column_sweep`).

The choice is greedy, and the compensation reaches later columns only:
:mod:`llmcompressor.numerics.sparse_fit` does better at both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompressor.numerics.column_sweep import (
    Block,
    Column,
    DecideColumn,
    column_ops,
    columns_first,
    rows_first,
    sweep_columns_,
)
from llmcompressor.numerics.masks import Sparsity, keep_mask


class SparseResult(NamedTuple):
    """A pruned weight, float32 ``[..., R, C]``, zero where it is not kept (bool, same shape).

    ``loss_R`` is ½ tr(D H Dᵀ) of each row, D the change of the weight: float32 ``[..., R]``.
    """

    weight_RC: Tensor
    kept_RC: Tensor
    loss_R: Tensor


def sparse_sweep(
    weight_RC: Tensor,
    factor_CC: Tensor,
    sparsity: Sparsity,
    *,
    gone_RC: Tensor | None = None,
    block: int = 128,
    strip: int = 16,
) -> SparseResult:
    """Prune ``weight_RC`` from left to right; nothing is mutated.

    With N:M the result depends on ``block`` and ``strip`` only by floating-point rounding;
    otherwise ``block`` is the number of columns within which weights are compared.

    Args:
        weight_RC: float32 ``[..., R, C]``.
        factor_CC: R, float32 ``[..., C, C]``.
        sparsity: the exact number of weights to remove.
        gone_RC: bool ``[..., R, C]``: weights that are zero in any case, included in the number.
        block: columns of a block; with N:M it is rounded to a multiple of M.
        strip: columns whose updates to the rest of the block are accumulated in one product.
    """
    work_CR = columns_first(weight_RC, None)
    gone_CR = None if gone_RC is None else gone_RC.mT.contiguous()
    kept_CR = torch.ones_like(work_CR, dtype=torch.bool)
    root_C1 = factor_CC.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    M = 1 if sparsity.group is None else sparsity.group.group
    strip = max(1, strip // M) * M
    block = max(1, block // strip) * strip if M > 1 else block
    taken = [0] * len(sparsity.shares)

    def choose(values_KR: Tensor, lo: int) -> Tensor:
        """Mask of the weights to keep in the columns from ``lo`` on, 0 and 1."""
        hi = lo + values_KR.shape[-2]
        score_KR = (values_KR * root_C1[..., lo:hi, :]).square_()
        asked = sparsity.zeros(hi)
        budgets = [all_ - before for all_, before in zip(asked, taken, strict=True)]
        gone_KR = None if gone_CR is None else gone_CR[..., lo:hi, :]
        chosen_KR = keep_mask(score_KR, sparsity, gone_CR=gone_KR, budgets=budgets)
        taken[:] = asked
        kept_CR[..., lo:hi, :] = chosen_KR
        return chosen_KR.to(values_KR.dtype)

    def enter(entered: Block) -> DecideColumn:
        width = M if M > 1 else entered.now_BR.shape[-2]
        columns_R: Iterator[Column] = iter(())

        def decide(w_R: Column, b: int, out_R: Column) -> None:
            nonlocal columns_R
            if b % width == 0:
                chosen_KR = choose(entered.lookahead(slice(b, b + width)), entered.first + b)
                columns_R = iter(ops.columns(chosen_KR))
            ops.multiply(w_R, next(columns_R), out=out_R)

        return decide

    ops = column_ops(work_CR)
    decided_CR, loss_R = sweep_columns_(work_CR, factor_CC, enter, ops, block=block, strip=strip)
    return SparseResult(rows_first(decided_CR, None), rows_first(kept_CR, None), loss_R)
