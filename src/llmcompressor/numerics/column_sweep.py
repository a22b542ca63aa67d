# SPDX-License-Identifier: Apache-2.0
r"""The column sweep of GPTQ and SparseGPT: decide one column, move its error onto the later ones.

With U upper triangular, ``UᵀU = H⁻¹`` (:mod:`llmcompressor.numerics.hessian`), for every column c
from left to right, q_c being what is decided for it (arXiv:2210.17323, arXiv:2301.00774, Alg. 1),

.. math:: e_c = (w_c - q_c) / U_{cc}, \qquad w_j \leftarrow w_j - e_c\,U_{cj} \quad (j > c) .

The updates are delayed, as in the papers, but at two levels, because a rank-one update of a wide
block moves far more memory than it computes::

    columns   |--- block (128) -----------------------------|--- the rest ---|
              |-- strip (16) --|-- strip --|  ...           |                |
    per column: rank-one update of the rest of its strip
    per strip:  one product for the rest of its block
    per block:  one product for the rest of the weight

So a column is up to date when it is decided; when its strip begins, the whole strip is; when its
block begins, the whole block is.

Inside, the weight is transposed (``[C, R]``): a column of W is then contiguous memory. Rows do
not see each other, so several Linears with one input are stacked and solved at once; a leading
batch dimension solves many small weights with their own Hessians in one call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmcompressor.numerics.column_ops import Column, ColumnOps
from llmcompressor.numerics.products import subtract_matmul_
from llmcompressor.threads import each_span, one_thread

__all__ = [
    "DecideColumn",
    "EnterBlock",
    "columns_first",
    "in_order_again",
    "rows_first",
    "subtract_product",
    "sweep_columns_",
]

DecideColumn = Callable[[Column, int, Column], None]
"""Decides a column ``[..., R]``, given its number in the block, into the third argument."""
EnterBlock = Callable[[Tensor, int], DecideColumn]
"""Told of a block ``[..., B, R]``, up to date, and of its first column's number in the weight."""


def sweep_columns_(
    work_CR: Tensor,
    factor_CC: Tensor,
    enter: EnterBlock,
    ops: ColumnOps,
    *,
    block: int = 128,
    strip: int = 16,
) -> Tensor:
    """Decide all columns of ``work_CR`` in place.

    Args:
        work_CR: the weight, its columns in the order in which they are decided, float32
            ``[..., C, R]``.
        factor_CC: U, its columns in that order too, float32 ``[..., C, C]``.
        enter: called when a block begins; what it returns decides its columns.
        ops: what ``work_CR``'s columns are worked on with, and handed over as.
        block: columns whose updates to the rest of the weight are gathered into one product.
        strip: columns whose updates to the rest of the block are gathered into one product.

    Returns:
        ½ Σ_c (w_c - q_c)² / U_cc², float32 ``[..., R]``.
    """
    columns = work_CR.shape[-2]
    loss_R = work_CR.new_zeros(work_CR.shape[:-2] + work_CR.shape[-1:])
    decided_BR = torch.empty_like(work_CR[..., : min(block, columns), :])
    for lo in range(0, columns, block):
        hi = min(lo + block, columns)
        block_BR = work_CR[..., lo:hi, :]
        done_BR = decided_BR[..., : hi - lo, :]
        with one_thread(work_CR.device):
            decide = enter(block_BR, lo)
            _sweep_block(block_BR, factor_CC[..., lo:hi, lo:hi], done_BR, decide, ops, strip)
        if hi < columns:
            _subtract_by_rows(work_CR[..., hi:, :], factor_CC[..., lo:hi, hi:], block_BR)
        loss_R += block_BR.square().sum(dim=-2)
        block_BR.copy_(done_BR)
    return loss_R.mul_(0.5)


def _sweep_block(
    work_BR: Tensor,
    factor_BB: Tensor,
    decided_BR: Tensor,
    decide: DecideColumn,
    ops: ColumnOps,
    strip: int,
) -> None:
    """Decide the columns of one block into ``decided_BR``; ``work_BR`` is left with the errors."""
    inverse_B1 = factor_BB.diagonal(dim1=-2, dim2=-1).reciprocal().unsqueeze(-1)
    inverses_1 = ops.columns(inverse_B1)
    columns_R, decided_R = ops.columns(work_BR), ops.columns(decided_BR)
    errors_BR, factors_BB = ops.view(work_BR), ops.view(factor_BB)
    scratch_SR = ops.scratch(work_BR[..., :strip, :])
    width = work_BR.shape[-2]
    for lo in range(0, width, strip):
        hi = min(lo + strip, width)
        for b in range(lo, hi):
            column_R = columns_R[b]
            decide(column_R, b, decided_R[b])
            ops.subtract(column_R, decided_R[b], out=column_R)
            ops.multiply(column_R, inverses_1[b], out=column_R)
            if b + 1 < hi:
                rest_KR, factor_K = errors_BR[..., b + 1 : hi, :], factors_BB[..., b, b + 1 : hi]
                ops.subtract_outer(rest_KR, factor_K, column_R, scratch_SR)
        subtract_product(work_BR[..., hi:, :], factor_BB[..., lo:hi, hi:], work_BR[..., lo:hi, :])


def _subtract_by_rows(target_MR: Tensor, factor_KM: Tensor, error_KR: Tensor) -> None:
    """:func:`subtract_product` for many rows."""
    factor_MK = factor_KM.contiguous().mT

    def subtract(span: slice) -> None:
        subtract_matmul_(target_MR[..., span], factor_MK, error_KR[..., span])

    each_span(subtract, target_MR.shape[-1], target_MR.device)


def columns_first(weight_RC: Tensor, order_C: Tensor | None) -> Tensor:
    """A float32 copy ``[..., C, R]``, its columns in ``order_C``."""
    work_CR = torch.empty(weight_RC.mT.shape, dtype=torch.float32, device=weight_RC.device)

    def turn(rows: slice) -> None:
        # turned in memory of its own: torch turns whole matrices fast, and parts of one slowly
        part_CS = weight_RC[..., rows, :].float().mT.contiguous()
        work_CR[..., rows] = part_CS if order_C is None else _in_order(part_CS, order_C)

    each_span(turn, weight_RC.shape[-2], weight_RC.device)
    return work_CR


def rows_first(work_CR: Tensor, order_C: Tensor | None) -> Tensor:
    """The inverse of :func:`columns_first`."""
    weight_RC = torch.empty(work_CR.mT.shape, dtype=work_CR.dtype, device=work_CR.device)
    place_C = None if order_C is None else order_C.argsort(dim=-1)

    def turn(rows: slice) -> None:
        part_CS = work_CR[..., rows].contiguous()
        if place_C is not None:
            part_CS = _in_order(part_CS, place_C)
        weight_RC[..., rows, :] = part_CS.mT.contiguous()

    each_span(turn, work_CR.shape[-1], work_CR.device)
    return weight_RC


def in_order_again(work_CR: Tensor, order_C: Tensor) -> Tensor:
    """A copy with the columns of :func:`columns_first` in their own places."""
    return _in_order(work_CR, order_C.argsort(dim=-1))


def _in_order(work_CR: Tensor, order_C: Tensor) -> Tensor:
    """A copy with its first dimension in that order: whole stretches of memory are moved."""
    if work_CR.ndim == 2:
        return work_CR.index_select(0, order_C)
    return work_CR.gather(-2, order_C.unsqueeze(-1).expand(work_CR.shape))


def subtract_product(target_MR: Tensor, factor_KM: Tensor, error_KR: Tensor) -> None:
    """``target -= factorᵀ error``."""
    if target_MR.shape[-2] == 0:
        return
    subtract_matmul_(target_MR, factor_KM.mT, error_KR)
