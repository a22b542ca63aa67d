# SPDX-License-Identifier: Apache-2.0
r"""GPTQ: round columns one by one, moving each error onto the columns still to come.

For a weight W (R rows, C columns) and inputs with Hessian ``H = XᵀX``, GPTQ (arXiv:2210.17323,
Alg. 1) lowers the error of the output, ``tr((Q − W) H (Q − W)ᵀ)``. With U upper triangular,
``UᵀU = H⁻¹`` (see :mod:`llmcompressor.numerics.hessian`), for every column c from left to right

.. math::
    q_c = \operatorname{round}(w_c), \qquad
    e_c = (w_c - q_c) / U_{cc}, \qquad
    w_j \leftarrow w_j - e_c\,U_{cj} \quad (j > c) .

The updates are delayed, as in the paper, but at two levels, because a rank-one update of a wide
block moves far more memory than it computes::

    columns   |--- block (128) -----------------------------|--- the rest ---|
              |-- strip (16) --|-- strip --|  ...           |                |
    per column: rank-one update of the rest of its strip
    per strip:  one product for the rest of its block
    per block:  one product for the rest of the weight

Inside, the weight is transposed (``[C, R]``): a column of W is then contiguous memory. Rows do
not see each other, so several Linears with one input are stacked and solved at once; a leading
batch dimension solves many small weights with their own Hessians in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.hessian import ridge
from llmcompressor.threads import one_thread

__all__ = ["ColumnScales", "GptqResult", "activation_order", "descend", "sweep"]

RoundColumn = Callable[[Tensor, int, Tensor], None]
"""Rounds a column, given its number, into the third argument."""


class ColumnScales(NamedTuple):
    """The scales of a weight as a column sweep sees them: one per row and group of columns.

    tensor: G = 1, equal rows. channel: G = 1. group: G = C / group size. block: rows repeated.
    """

    scale_RG: Tensor
    """float32 ``[..., R, G]``."""
    zero_RG: Tensor | None
    """Zero points as float32 ``[..., R, G]``, or ``None`` for a symmetric grid."""
    group_of_column_C: Tensor
    """int64 ``[C]``: which group a column belongs to."""


class GptqResult(NamedTuple):
    """What :func:`sweep` returns."""

    weight_RC: Tensor
    """Rounded and dequantized, float32 ``[..., R, C]``."""
    loss_R: Tensor
    """½ Σ_c (w_c - q_c)² / U_cc², float32 ``[..., R]`` (arXiv:2210.17323, Alg. 1)."""


def activation_order(hessian_CC: Tensor) -> Tensor:
    """Columns by falling diagonal of the Hessian: int64 ``[..., C]``; ties keep their order."""
    return hessian_CC.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)


def sweep(
    weight_RC: Tensor,
    factor_CC: Tensor,
    scales: ColumnScales,
    grid: Grid,
    *,
    order_C: Tensor | None = None,
    block: int = 128,
    strip: int = 16,
) -> GptqResult:
    """Round the columns of ``weight_RC``, from left to right or in a given order.

    Nothing is mutated. The result does not depend on ``block`` and ``strip`` but for rounding.

    Args:
        weight_RC: float32 ``[..., R, C]``.
        factor_CC: upper triangular U with ``UᵀU = (H + λI)⁻¹``, float32 ``[..., C, C]``; its
            columns in the order in which they are rounded.
        scales: scale and zero point of every row and column; columns in that order too.
        grid: the numbers that a weight may become.
        order_C: which column comes when, int64 ``[..., C]``; the result has the columns in their
            own places.
        block: columns whose updates to the rest of the weight are gathered into one product.
        strip: columns whose updates to the rest of the block are gathered into one product.
    """
    work_CR = _columns_first(weight_RC, order_C)
    round_column = _column_rounder(scales, grid)
    columns = work_CR.shape[-2]
    loss_R = work_CR.new_zeros(work_CR.shape[:-2] + work_CR.shape[-1:])
    rounded_BR = torch.empty_like(work_CR[..., : min(block, columns), :])
    for lo in range(0, columns, block):
        hi = min(lo + block, columns)
        block_BR = work_CR[..., lo:hi, :]
        done_BR = rounded_BR[..., : hi - lo, :]
        with one_thread(work_CR.device):
            _sweep_block(
                block_BR,
                factor_CC[..., lo:hi, lo:hi],
                done_BR,
                _from_column(lo, round_column),
                strip,
            )
        _subtract_product(work_CR[..., hi:, :], factor_CC[..., lo:hi, hi:], block_BR)
        loss_R += block_BR.square().sum(dim=-2)
        block_BR.copy_(done_BR)
    return GptqResult(_rows_first(work_CR, order_C), loss_R.mul_(0.5))


def _from_column(first: int, round_column: RoundColumn) -> RoundColumn:
    """``round_column`` for a block whose columns are counted from its own first one."""
    return lambda w_R, b, out_R: round_column(w_R, first + b, out_R)


def _sweep_block(
    work_BR: Tensor, factor_BB: Tensor, rounded_BR: Tensor, round_column: RoundColumn, strip: int
) -> None:
    """Round the columns of one block into ``rounded_BR``; ``work_BR`` is left with the errors."""
    inverses_1 = factor_BB.diagonal(dim1=-2, dim2=-1).reciprocal().unsqueeze(-1).unbind(-2)
    columns_R, rounded_R = work_BR.unbind(-2), rounded_BR.unbind(-2)
    width = work_BR.shape[-2]
    for lo in range(0, width, strip):
        hi = min(lo + strip, width)
        for b in range(lo, hi):
            column_R = columns_R[b]
            round_column(column_R, b, rounded_R[b])
            column_R.sub_(rounded_R[b]).mul_(inverses_1[b])
            if b + 1 < hi:
                rest_KR, factor_K = work_BR[..., b + 1 : hi, :], factor_BB[..., b, b + 1 : hi]
                _subtract_outer(rest_KR, factor_K, column_R)
        _subtract_product(work_BR[..., hi:, :], factor_BB[..., lo:hi, hi:], work_BR[..., lo:hi, :])


def descend(
    weight_RC: Tensor,
    rounded_RC: Tensor,
    hessian_CC: Tensor,
    scales: ColumnScales,
    grid: Grid,
    *,
    dampening: float = 0.0,
    block: int = 128,
    strip: int = 16,
) -> GptqResult:
    r"""One round of coordinate descent on what a sweep has rounded.

    The sweep decides each column once, before it knows the later ones. With D = Q − W, every
    column is now decided again, given all the others (QuantEase, arXiv:2309.01885, Eq. 8):

    .. math:: q_c \leftarrow \operatorname{round}\bigl(q_c - (D H)_c / H_{cc}\bigr)

    which is the exact minimum over that column, so that ``tr(D H Dᵀ)`` never rises. ``D H`` is kept
    for one block of columns at a time, as the sweep keeps its errors.

    Args:
        weight_RC: what was to be rounded, float32 ``[..., R, C]``.
        rounded_RC: values on the grid, float32 ``[..., R, C]``; not changed.
        hessian_CC: H, float32 ``[..., C, C]``.
        scales: scale and zero point of every row and column.
        grid: the numbers that a weight may become.
        dampening: what is added to the diagonal of H, as a fraction of its mean.
        block: columns whose sums are kept up to date at once.
        strip: columns whose updates to the rest of the block are gathered into one product.

    Returns:
        Values on the grid, and by how much the loss of each row has changed (never more than 0).
    """
    rounded_CR = _columns_first(rounded_RC, None)
    change_CR = rounded_CR - weight_RC.mT
    round_column = _column_rounder(scales, grid)
    diagonal_C = hessian_CC.diagonal(dim1=-2, dim2=-1)
    added_1 = ridge(hessian_CC, dampening)
    curvature_C = diagonal_C + added_1
    step_C = curvature_C.reciprocal().masked_fill(diagonal_C == 0, 0)
    columns = rounded_CR.shape[-2]
    saved_R = rounded_CR.new_zeros(rounded_CR.shape[:-2] + rounded_CR.shape[-1:])
    for lo in range(0, columns, block):
        hi = min(lo + block, columns)
        sums_BR = hessian_CC[..., lo:hi, :] @ change_CR
        sums_BR += added_1.unsqueeze(-1) * change_CR[..., lo:hi, :]
        moved_BR, decided_BR = torch.empty_like(sums_BR), torch.empty_like(sums_BR)
        with one_thread(rounded_CR.device):
            _descend_block(
                rounded_CR[..., lo:hi, :],
                hessian_CC[..., lo:hi, lo:hi],
                sums_BR,
                (decided_BR, moved_BR),
                step_C[..., lo:hi],
                _from_column(lo, round_column),
                strip,
            )
        rounded_CR[..., lo:hi, :] = decided_BR
        change_CR[..., lo:hi, :] += moved_BR
        # ½ tr(D H Dᵀ) changes by m s + ½ H_cc m², s being the column's sum when it was decided.
        sums_BR.addcmul_(moved_BR, curvature_C[..., lo:hi, None], value=0.5)
        saved_R += sums_BR.mul_(moved_BR).sum(dim=-2)
    return GptqResult(_rows_first(rounded_CR, None), saved_R)


def _descend_block(
    rounded_BR: Tensor,
    hessian_BB: Tensor,
    sums_BR: Tensor,
    out: tuple[Tensor, Tensor],
    step_B: Tensor,
    round_column: RoundColumn,
    strip: int,
) -> None:
    """Decide the columns of one block again; ``out`` gets what they become, and the difference."""
    decided_BR, moved_BR = out
    steps_1 = step_B.neg().unsqueeze(-1).unbind(-2)
    columns_R, each_R = rounded_BR.unbind(-2), sums_BR.unbind(-2)
    decided_R, moves_R = decided_BR.unbind(-2), moved_BR.unbind(-2)
    width = rounded_BR.shape[-2]
    for lo in range(0, width, strip):
        hi = min(lo + strip, width)
        for b in range(lo, hi):
            column_R = columns_R[b]
            round_column(torch.addcmul(column_R, each_R[b], steps_1[b]), b, decided_R[b])
            torch.sub(column_R, decided_R[b], out=moves_R[b])
            if b + 1 < hi:
                rest_KR, row_K = sums_BR[..., b + 1 : hi, :], hessian_BB[..., b, b + 1 : hi]
                _subtract_outer(rest_KR, row_K, moves_R[b])
        _subtract_product(
            sums_BR[..., hi:, :], hessian_BB[..., lo:hi, hi:], moved_BR[..., lo:hi, :]
        )
    moved_BR.neg_()  # it was old minus new: what the sums lose


def _columns_first(weight_RC: Tensor, order_C: Tensor | None) -> Tensor:
    """A float32 copy ``[..., C, R]``, its columns in ``order_C``."""
    if order_C is None:
        return torch.empty(weight_RC.mT.shape, dtype=torch.float32, device=weight_RC.device).copy_(
            weight_RC.mT
        )
    index_CR = order_C.unsqueeze(-1).expand(weight_RC.mT.shape)
    return weight_RC.mT.gather(-2, index_CR).float()


def _rows_first(work_CR: Tensor, order_C: Tensor | None) -> Tensor:
    """The inverse of :func:`_columns_first`."""
    if order_C is None:
        return work_CR.mT.contiguous()
    index_RC = order_C.unsqueeze(-2).expand(work_CR.mT.shape)
    return torch.empty(work_CR.mT.shape, dtype=work_CR.dtype, device=work_CR.device).scatter_(
        -1, index_RC, work_CR.mT
    )


def _column_rounder(scales: ColumnScales, grid: Grid) -> RoundColumn:
    """One indexed lookup answers "which scale does this column use?" for every strategy."""
    scale_GR = scales.scale_RG.mT.float().contiguous()
    scales_R = scale_GR.unbind(-2)
    inverses_R = scale_GR.reciprocal().unbind(-2)
    zeros_R = None if scales.zero_RG is None else scales.zero_RG.mT.float().unbind(-2)
    group_of_column = scales.group_of_column_C.tolist()
    qmin, qmax = grid.qmin, grid.qmax

    def round_int(w_R: Tensor, c: int, out_R: Tensor) -> None:
        g = group_of_column[c]
        q_R = torch.mul(w_R, inverses_R[g])
        if zeros_R is None:
            torch.mul(q_R.round_().clamp_(qmin, qmax), scales_R[g], out=out_R)
            return
        q_R = q_R.add_(zeros_R[g]).round_().clamp_(qmin, qmax)
        torch.mul(q_R.sub_(zeros_R[g]), scales_R[g], out=out_R)

    def round_float(w_R: Tensor, c: int, out_R: Tensor) -> None:
        g = group_of_column[c]
        q_R = torch.mul(w_R, inverses_R[g])
        if zeros_R is not None:
            q_R = grid.round(q_R.add_(zeros_R[g])).sub_(zeros_R[g])
        else:
            q_R = grid.round(q_R)
        torch.mul(q_R, scales_R[g], out=out_R)

    return round_int if grid.kind == "int" else round_float


def _subtract_outer(target_KR: Tensor, factor_K: Tensor, error_R: Tensor) -> None:
    if target_KR.ndim == 2:
        target_KR.addr_(factor_K, error_R, alpha=-1)
    else:
        target_KR.sub_(factor_K.unsqueeze(-1) * error_R.unsqueeze(-2))


def _subtract_product(target_MR: Tensor, factor_KM: Tensor, error_KR: Tensor) -> None:
    """``target -= factorᵀ error``."""
    if target_MR.shape[-2] == 0:
        return
    if target_MR.ndim == 2:
        target_MR.addmm_(factor_KM.T, error_KR, alpha=-1)
    else:
        target_MR.sub_(factor_KM.mT @ error_KR)
