# SPDX-License-Identifier: Apache-2.0
r"""The column sweep of GPTQ and SparseGPT: fix one column, and let the later ones compensate.

With R upper triangular, ``R Rᵀ = H`` (:mod:`llmcompressor.numerics.hessian`), the columns q_c are
decided from left to right, each from its weight after the changes of the columns before it:

.. math:: v_c = w_c - \sum_{k < c} (q_k - w_k)\,R_{kc} / R_{cc}, \qquad
      \tfrac12 \operatorname{tr}\bigl((Q - W) H (Q - W)^\top\bigr)
      = \tfrac12 \sum_c R_{cc}^2 \lVert v_c - q_c \rVert^2 .

These are the v_c of GPTQ and SparseGPT (arXiv:2210.17323, arXiv:2301.00774, Alg. 1), whose
algorithm moves each error onto all later columns by rows of a factor of H⁻¹; written this way
(LDLQ, arXiv:2307.13304, Theorem 6) nothing is inverted, and a column is written once instead of
once for each before it. Only the intermediate value of a column before its turn differs: the
papers' form holds its best value given all decided columns, which :meth:`Block.ahead` computes here
for methods that look ahead. The contributions of earlier columns are accumulated at two levels::

    columns   |--- decided -----------------|--- block (128) ---------------|
                                            |-- strip (16) --|-- strip --|  ...
    per block:  one product of all decided columns for the block
    per strip:  one product of the block's decided columns for the strip
    per column: rank-one update of the rest of its strip

So a column is up to date when it is decided; when its strip begins, the whole strip is up to date
with all before it; when its block begins, the whole block is.

Internally the weight is transposed (``[C, R]``); a column of W is then contiguous memory. Rows are
independent, so several Linears with one input are stacked and solved at once; a leading batch
dimension solves many small weights with their own Hessians in one call.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from llmcompressor.numerics.products import subtract_matmul_
from llmcompressor.runtime.threads import one_thread, parallel_spans

# --------------------
# Column operations of a column sweep, in torch or, on the CPU, in numpy.
#
# For columns of a few thousand elements torch's call overhead exceeds the work itself. numpy has a
# third of that overhead and works on the same memory: its arrays are views of the tensors.

Column: TypeAlias = Any
"""A tensor or an array, ``[..., R]``."""
_SHORT = 2**14
"""Elements of a column from which on the work itself takes longer than beginning it."""


class ColumnOps(NamedTuple):
    """Operations on columns. Each writes to existing memory, given as ``out``."""

    view: Callable[[Tensor], Any]
    """A tensor as these operations take it: the same memory."""
    columns: Callable[[Tensor], Sequence[Column]]
    """The columns of a tensor ``[..., K, R]``: K views."""
    scratch: Callable[[Tensor], Any]
    """Memory of the shape of a tensor for intermediate results."""
    number: Callable[[float], Any]
    """A number as these operations take it."""
    multiply: Callable[..., Any]
    """``multiply(a, b, out=c)``."""
    add: Callable[..., Any]
    subtract: Callable[..., Any]
    round: Callable[..., Any]
    """To integers, ties to even: ``round(a, out=c)``."""
    clamp: Callable[..., Any]
    """``clamp(a, least, greatest, out=c)``; the ends from ``number``."""
    subtract_outer: Callable[[Any, Any, Column, Any], None]
    """``target -= factor errorᵀ``: ``[..., K, R]``, ``[..., K]``, ``[..., R]``, and scratch."""


def column_ops(work_CR: Tensor, *, by_torch: bool = False) -> ColumnOps:
    """The faster operations for columns of ``work_CR``, float32 ``[..., C, R]``."""
    length = work_CR[..., 0, :].numel()
    short = work_CR.device.type == "cpu" and work_CR.dtype == torch.float32 and length < _SHORT
    return _NUMPY if short and not by_torch else _TORCH


def _outer_by_torch(target_KR: Tensor, factor_K: Tensor, error_R: Tensor, _: Tensor) -> None:
    if target_KR.ndim == 2:
        target_KR.addr_(factor_K, error_R, alpha=-1)
    else:
        target_KR.sub_(factor_K.unsqueeze(-1) * error_R.unsqueeze(-2))


def _outer_by_numpy(target_KR: Any, factor_K: Any, error_R: Any, scratch_SR: Any) -> None:
    product_KR = scratch_SR[..., : factor_K.shape[-1], :]
    np.multiply(factor_K[..., None], error_R[..., None, :], out=product_KR)
    np.subtract(target_KR, product_KR, out=target_KR)


def _clip() -> Callable[..., Any]:
    """Return numpy's low-level ``clip`` without its Python wrapper, which is six times as slow."""
    with contextlib.suppress(ImportError, AttributeError):
        found: Callable[..., Any] = importlib.import_module("numpy._core.umath").clip
        return found
    return np.clip


_TORCH = ColumnOps(
    view=lambda tensor: tensor,
    columns=lambda tensor_KR: tensor_KR.unbind(-2),
    scratch=torch.empty_like,
    number=float,
    multiply=torch.mul,
    add=torch.add,
    subtract=torch.sub,
    round=torch.round,
    clamp=torch.clamp,
    subtract_outer=_outer_by_torch,
)
_NUMPY = ColumnOps(
    view=lambda tensor: tensor.numpy(),
    columns=lambda tensor_KR: list(np.moveaxis(tensor_KR.numpy(), -2, 0)),
    scratch=lambda tensor: np.empty(tensor.shape, np.float32),
    number=lambda value: np.array(value, np.float32),
    multiply=np.multiply,
    add=np.add,
    subtract=np.subtract,
    round=np.rint,
    clamp=_clip(),
    subtract_outer=_outer_by_numpy,
)


DecideColumn = Callable[[Column, int, Column], None]
"""Decides a column ``[..., R]``, given its number in the block, into the third argument."""


class Block(NamedTuple):
    """The next columns to be decided, up to date with all columns before the block.

    Updates within the block are applied strip by strip; the column being decided is always up to
    date.
    """

    first: int
    """The number of its first column in the weight."""
    now_BR: Tensor
    """v, as far as columns are decided, float32 ``[..., B, R]``."""
    weight_BR: Tensor
    """w of the columns that are not decided yet, float32 ``[..., B, R]``."""
    shares_BB: Tensor
    """R_kc / R_cc, upper triangular, float32 ``[..., B, B]``."""

    def lookahead(self, columns: slice) -> Tensor:
        """The next columns, given that those of them decided first are not changed.

        In the papers' form, where every error is moved to all later columns, these are the present
        values of the columns. A new tensor ``[..., K, R]``.
        """
        weight_KR = self.weight_BR[..., columns, :]
        shares_KK = self.shares_BB[..., columns, columns]
        moved_KR: Tensor = torch.linalg.solve_triangular(
            shares_KK.mT, self.now_BR[..., columns, :] - weight_KR, upper=False, unitriangular=True
        )
        return moved_KR.add_(weight_KR)


EnterBlock = Callable[[Block], DecideColumn]
"""Told of a block when it begins; what it returns decides its columns."""


def sweep_columns_(
    work_CR: Tensor,
    factor_CC: Tensor,
    enter: EnterBlock,
    ops: ColumnOps,
    *,
    block: int = 128,
    strip: int = 16,
) -> tuple[Tensor, Tensor]:
    """Decide all columns of ``work_CR``, which is overwritten with the change Q − W.

    Args:
        work_CR: the weight, its columns in the order in which they are decided, float32
            ``[..., C, R]``.
        factor_CC: R, its columns in that order too, float32 ``[..., C, C]``.
        enter: called when a block begins; returns the function that decides its columns.
        ops: operations for the columns of ``work_CR``, in whose form columns are passed on.
        block: columns for which all before them are accumulated in one product.
        strip: columns for which those before them in the block are accumulated in one product.

    Returns:
        Q, float32 ``[..., C, R]``, and ½ Σ_c R_cc² (v_c - q_c)², float32 ``[..., R]``.
    """
    columns = work_CR.shape[-2]
    loss_R = work_CR.new_zeros(work_CR.shape[:-2] + work_CR.shape[-1:])
    decided_CR = torch.empty_like(work_CR)
    for lo in range(0, columns, block):
        hi = min(lo + block, columns)
        block_BR, done_BR = work_CR[..., lo:hi, :], decided_CR[..., lo:hi, :]
        root_B = factor_CC[..., lo:hi, lo:hi].diagonal(dim1=-2, dim2=-1)
        shares_KB = factor_CC[..., :hi, lo:hi] / root_B.unsqueeze(-2)
        now_BR = block_BR.clone()
        if lo > 0:
            _subtract_by_rows(now_BR, shares_KB[..., :lo, :], work_CR[..., :lo, :])
        with one_thread(work_CR.device):
            entered = Block(lo, now_BR, block_BR, shares_KB[..., lo:, :])
            _sweep_block(entered, done_BR, enter(entered), ops, strip)
        loss_R += now_BR.sub_(done_BR).mul_(root_B.unsqueeze(-1)).square_().sum(dim=-2)
    return decided_CR, loss_R.mul_(0.5)


def _subtract_by_rows(target_BR: Tensor, shares_KB: Tensor, change_KR: Tensor) -> None:
    """:func:`subtract_product` for many rows."""
    shares_BK = shares_KB.mT

    def subtract(span: slice) -> None:
        subtract_matmul_(target_BR[..., span], shares_BK, change_KR[..., span])

    parallel_spans(subtract, target_BR.shape[-1], target_BR.device)


def _sweep_block(
    block: Block, decided_BR: Tensor, decide: DecideColumn, ops: ColumnOps, strip: int
) -> None:
    """Decide the columns of a block; its weight is overwritten with the change."""
    now_BR, work_BR, shares_BB = block.now_BR, block.weight_BR, block.shares_BB
    columns_R, weights_R = ops.columns(now_BR), ops.columns(work_BR)
    decided_R = ops.columns(decided_BR)
    all_BR, each_BB = ops.view(now_BR), ops.view(shares_BB)
    scratch_SR = ops.scratch(now_BR[..., :strip, :])
    width = now_BR.shape[-2]
    for lo in range(0, width, strip):
        hi = min(lo + strip, width)
        if lo > 0:
            subtract_product(
                now_BR[..., lo:hi, :], shares_BB[..., :lo, lo:hi], work_BR[..., :lo, :]
            )
        for b in range(lo, hi):
            decide(columns_R[b], b, decided_R[b])
            change_R = weights_R[b]
            ops.subtract(decided_R[b], change_R, out=change_R)
            if b + 1 < hi:
                rest_KR, share_K = all_BR[..., b + 1 : hi, :], each_BB[..., b, b + 1 : hi]
                ops.subtract_outer(rest_KR, share_K, change_R, scratch_SR)


def columns_first(weight_RC: Tensor, order_C: Tensor | None) -> Tensor:
    """A transposed float32 copy ``[..., C, R]``, with its columns in ``order_C``."""
    work_CR = torch.empty(weight_RC.mT.shape, dtype=torch.float32, device=weight_RC.device)

    def turn(rows: slice) -> None:
        # transposed in its own memory: torch transposes whole matrices fast, and parts slowly
        part_CS = weight_RC[..., rows, :].float().mT.contiguous()
        work_CR[..., rows] = part_CS if order_C is None else _in_order(part_CS, order_C)

    parallel_spans(turn, weight_RC.shape[-2], weight_RC.device)
    return work_CR


def rows_first(work_CR: Tensor, order_C: Tensor | None) -> Tensor:
    """Transpose back and restore the column order: the inverse of :func:`columns_first`."""
    weight_RC = torch.empty(work_CR.mT.shape, dtype=work_CR.dtype, device=work_CR.device)
    place_C = None if order_C is None else order_C.argsort(dim=-1)

    def turn(rows: slice) -> None:
        part_CS = work_CR[..., rows].contiguous()
        if place_C is not None:
            part_CS = _in_order(part_CS, place_C)
        weight_RC[..., rows, :] = part_CS.mT.contiguous()

    parallel_spans(turn, work_CR.shape[-1], work_CR.device)
    return weight_RC


def restore_column_order(work_CR: Tensor, order_C: Tensor) -> Tensor:
    """A copy with the columns of :func:`columns_first` in their original order."""
    return _in_order(work_CR, order_C.argsort(dim=-1))


def _in_order(work_CR: Tensor, order_C: Tensor) -> Tensor:
    """A copy with its first dimension in that order; contiguous ranges are copied at once."""
    if work_CR.ndim == 2:
        return work_CR.index_select(0, order_C)
    return work_CR.gather(-2, order_C.unsqueeze(-1).expand(work_CR.shape))


def subtract_product(target_MR: Tensor, factor_KM: Tensor, error_KR: Tensor) -> None:
    """``target -= factorᵀ error``."""
    if target_MR.shape[-2] == 0:
        return
    subtract_matmul_(target_MR, factor_KM.mT, error_KR)


def stack_float32_rows(weights_RC: Sequence[Tensor]) -> Tensor:
    """The rows of all weights, each ``[R_i, C]``, in one new float32 matrix without other copies.

    >>> stack_float32_rows([torch.ones(1, 2), torch.zeros(1, 2).bfloat16()]).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    first, rows = weights_RC[0], [len(weight_RC) for weight_RC in weights_RC]
    shape = sum(rows), first.shape[-1]
    wide_RC = torch.empty(shape, dtype=torch.float32, device=first.device)
    for part_RC, weight_RC in zip(torch.split(wide_RC, rows), weights_RC, strict=True):
        part_RC.copy_(weight_RC)
    return wide_RC
