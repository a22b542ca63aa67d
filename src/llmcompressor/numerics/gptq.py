# SPDX-License-Identifier: Apache-2.0
r"""GPTQ: round columns one by one, and move each error onto the columns still to come.

For a weight W (R rows, C columns) and inputs with Hessian ``H = XᵀX``, GPTQ (arXiv:2210.17323,
Alg. 1) lowers the error of the output, ``tr((Q − W) H (Q − W)ᵀ)``. With R upper triangular,
``R Rᵀ = H`` (see :mod:`llmcompressor.numerics.hessian`), for every column c from left to right

.. math::
    q_c = \operatorname{round}(v_c), \qquad
    v_c = w_c - \sum_{k < c} (q_k - w_k)\,R_{kc} / R_{cc} .

:mod:`llmcompressor.numerics.column_sweep` has the algorithm, and why it equals GPTQ. Rows are
independent, so several Linears with one input are stacked and solved at once; a leading batch
dimension solves many small weights with their own Hessians in one call.

A pruned weight stays zero: in its column it gets the value 0, and the later columns compensate for
that as for any other error (joint sparsification and quantization, arXiv:2301.00774, Sec. 3.5).

Arguments of all functions, none of which they change:

==================  ==============================================================================
``weight_RC``       W, float32 ``[..., R, C]``
``rounded_RC``      Q, values on the grid, float32 ``[..., R, C]``
``hessian_CC``      H, float32 ``[..., C, C]``
``gram_CC``         the same, undamped
``kept_RC``         bool ``[..., R, C]``, false for weights that are to be zero; all if ``None``
``order_C``         the order of the columns in the sweep, int64 ``[..., C]``; by default their own
``dampening``       what is added to the diagonal of H, as a fraction of its mean
``block, strip``    columns whose updates to the rest are accumulated in one product, at two levels
==================  ==============================================================================

``block`` and ``strip`` change results by floating-point rounding alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompressor.numerics.cholesky import FactoredSolver, cholesky
from llmcompressor.numerics.column_sweep import (
    Column,
    ColumnOps,
    DecideColumn,
    column_ops,
    columns_first,
    restore_column_order,
    rows_first,
    subtract_product,
    sweep_columns_,
)
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.hessian import (
    DampedFactor,
    SingularHessianError,
    damp,
    factorize_with_rising_dampening,
    ridge,
)
from llmcompressor.numerics.products import OFTEN_ALIKE, matmul, parallel_matmul
from llmcompressor.runtime.threads import one_thread, parallel_spans, wide_span


class ColumnScales(NamedTuple):
    """The scales of a weight for a column sweep: one per row and group of columns.

    tensor: G = 1, equal rows. channel: G = 1. group: G = C / group size. block: rows repeated.
    """

    scale_RG: Tensor
    """float32 ``[..., R, G]``."""
    zero_RG: Tensor | None
    """Zero points as float32 ``[..., R, G]``, or ``None`` for a symmetric grid."""
    group_of_column_C: Tensor
    """int64 ``[C]``: which group a column belongs to."""


class GptqResult(NamedTuple):
    """Q, float32 ``[..., R, C]``, and ½ tr(D H Dᵀ) of each row, D = Q - W: float32 ``[..., R]``."""

    weight_RC: Tensor
    loss_R: Tensor


class _Rounding(NamedTuple):
    """How columns are rounded, and how many are worked on at once."""

    scales: ColumnScales
    grid: Grid
    block: int
    strip: int


def activation_order(hessian_CC: Tensor) -> Tensor:
    """Column indices by decreasing diagonal of the Hessian: int64 ``[..., C]``; a stable order."""
    return hessian_CC.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)


def sweep(
    weight_RC: Tensor,
    factor_CC: Tensor,
    scales: ColumnScales,
    grid: Grid,
    *,
    order_C: Tensor | None = None,
    kept_RC: Tensor | None = None,
    block: int = 128,
    strip: int = 16,
) -> GptqResult:
    """Round the columns of ``weight_RC``, from left to right or in a given order.

    ``factor_CC`` is R with ``R Rᵀ = H + λI``. It and ``scales`` have their columns in the order in
    which they are rounded; the weight, the mask and the result in their own.
    """
    work_CR = columns_first(weight_RC, order_C)
    how = _Rounding(scales, grid, block, strip)
    rounded_CR, loss_R = _sweep_(work_CR, factor_CC, how, _transposed_mask(kept_RC, order_C))
    del work_CR
    return GptqResult(rows_first(rounded_CR, order_C), loss_R)


def sweep_and_refine(
    weight_RC: Tensor,
    hessian_CC: Tensor,
    scales: ColumnScales,
    grid: Grid,
    *,
    dampening: float,
    rounds: int = 1,
    order_C: Tensor | None = None,
    kept_RC: Tensor | None = None,
    steps: int = 4,
    block: int = 128,
    strip: int = 16,
    factor: DampedFactor | None = None,
) -> tuple[GptqResult, float]:
    """Factorize H, :func:`sweep`, and then :func:`coordinate_descent` for ``rounds`` rounds.

    ``steps`` dampenings are tried, each ten times the one before, unless a ``factor`` of H in this
    order is given. The result equals that of these functions in turn; the weight is transposed only
    once.

    Returns:
        Q with the loss of each row, and the dampening that was needed.

    Raises:
        SingularHessianError: if all dampenings fail.
    """
    factor_CC, dampening = factor or factorize_with_rising_dampening(
        hessian_CC, dampening, order_C=order_C, steps=steps
    )
    work_CR = columns_first(weight_RC, order_C)
    kept_CR = _transposed_mask(kept_RC, order_C)
    in_order = scales if order_C is None else _permuted(scales, order_C)
    how = _Rounding(in_order, grid, block, strip)
    rounded_CR, loss_R = _sweep_(work_CR, factor_CC, how, kept_CR)
    del factor_CC  # as large as H, and no longer needed
    if rounds == 0:
        del work_CR
        return GptqResult(rows_first(rounded_CR, order_C), loss_R), dampening
    if order_C is not None:
        rounded_CR = restore_column_order(rounded_CR, order_C)
        kept_CR = _transposed_mask(kept_RC, None)
        work_CR = restore_column_order(work_CR, order_C)
    how = how._replace(scales=scales)
    for _ in range(rounds):
        loss_R += _descend_(rounded_CR, work_CR, hessian_CC, how, dampening, kept_CR)
    del work_CR
    return GptqResult(rows_first(rounded_CR, None), loss_R), dampening


def coordinate_descent(
    weight_RC: Tensor,
    rounded_RC: Tensor,
    hessian_CC: Tensor,
    scales: ColumnScales,
    grid: Grid,
    *,
    dampening: float = 0.0,
    kept_RC: Tensor | None = None,
    block: int = 128,
    strip: int = 16,
) -> GptqResult:
    r"""Run a round of coordinate descent on the result of a sweep.

    The sweep decides each column once, before the later ones are known. With D = Q − W, every
    column is now decided again, given all the others (QuantEase, arXiv:2309.01885, Eq. 8):

    .. math:: q_c \leftarrow \operatorname{round}\bigl(q_c - (D H)_c / H_{cc}\bigr)

    which is the exact minimum over that column, so that ``tr(D H Dᵀ)`` never rises. ``D H`` is kept
    for one block of columns at a time, as the sweep keeps its errors.

    Returns:
        The new Q, and the change of the loss of each row (never more than 0).
    """
    rounded_CR = columns_first(rounded_RC, None)
    change_CR = columns_first(weight_RC, None)
    torch.sub(rounded_CR, change_CR, out=change_CR)
    kept_CR = _transposed_mask(kept_RC, None)
    how = _Rounding(scales, grid, block, strip)
    changed_R = _descend_(rounded_CR, change_CR, hessian_CC, how, dampening, kept_CR)
    return GptqResult(rows_first(rounded_CR, None), changed_R)


def _transposed_mask(kept_RC: Tensor | None, order_C: Tensor | None) -> Tensor | None:
    return None if kept_RC is None else columns_first(kept_RC, order_C)


def _permuted(scales: ColumnScales, order_C: Tensor) -> ColumnScales:
    """The scales for columns in another order; with one order per problem, a scale per column."""
    group_C = scales.group_of_column_C[order_C]
    if order_C.ndim == 1:
        return scales._replace(group_of_column_C=group_C)

    def spread(values_RG: Tensor) -> Tensor:
        wide = group_C.unsqueeze(-2).expand(*values_RG.shape[:-1], group_C.shape[-1])
        return values_RG.gather(-1, wide)

    zero_RC = None if scales.zero_RG is None else spread(scales.zero_RG)
    own_C = torch.arange(group_C.shape[-1], device=group_C.device)
    return ColumnScales(spread(scales.scale_RG), zero_RC, own_C)


def _sweep_(
    work_CR: Tensor, factor_CC: Tensor, how: _Rounding, kept_CR: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`sweep` of a transposed weight, overwritten with Q − W; returns Q and row losses."""
    ops, round_column = _column_rounder(work_CR, how, kept_CR)
    return sweep_columns_(
        work_CR,
        factor_CC,
        lambda entered: _with_column_offset(entered.first, round_column),
        ops,
        block=how.block,
        strip=how.strip,
    )


def _with_column_offset(first: int, round_column: DecideColumn) -> DecideColumn:
    """``round_column`` with column indices relative to the first column of a block."""
    return lambda w_R, b, out_R: round_column(w_R, first + b, out_R)


def _descend_(
    rounded_CR: Tensor,
    change_CR: Tensor,
    hessian_CC: Tensor,
    how: _Rounding,
    dampening: float,
    kept_CR: Tensor | None,
) -> Tensor:
    """A round of descent of transposed Q and Q − W, in place; returns the change of the losses."""
    ops, round_column = _column_rounder(rounded_CR, how, kept_CR)
    diagonal_C = hessian_CC.diagonal(dim1=-2, dim2=-1)
    added_1 = ridge(hessian_CC, dampening)
    curvature_C = diagonal_C + added_1
    step_C = curvature_C.reciprocal().masked_fill(diagonal_C == 0, 0)
    columns = rounded_CR.shape[-2]
    saved_R = rounded_CR.new_zeros(rounded_CR.shape[:-2] + rounded_CR.shape[-1:])
    width = wide_span(rounded_CR.shape[-1])
    for lo in range(0, columns, how.block):
        hi = min(lo + how.block, columns)
        sums_BR = parallel_matmul(
            hessian_CC[..., lo:hi, :], change_CR, fewest=OFTEN_ALIKE, width=width
        )
        sums_BR += added_1.unsqueeze(-1) * change_CR[..., lo:hi, :]
        moved_BR, decided_BR = torch.empty_like(sums_BR), torch.empty_like(sums_BR)
        with one_thread(rounded_CR.device):
            _descend_block(
                rounded_CR[..., lo:hi, :],
                hessian_CC[..., lo:hi, lo:hi],
                sums_BR,
                (decided_BR, moved_BR),
                step_C[..., lo:hi],
                _with_column_offset(lo, round_column),
                ops,
                how.strip,
            )
        rounded_CR[..., lo:hi, :] = decided_BR
        change_CR[..., lo:hi, :] += moved_BR
        # ½ tr(D H Dᵀ) changes by m s + ½ H_cc m², s being the column's sum when it was decided.
        sums_BR.addcmul_(moved_BR, curvature_C[..., lo:hi, None], value=0.5)
        saved_R += sums_BR.mul_(moved_BR).sum(dim=-2)
    return saved_R


def _descend_block(
    rounded_BR: Tensor,
    hessian_BB: Tensor,
    sums_BR: Tensor,
    out: tuple[Tensor, Tensor],
    step_B: Tensor,
    round_column: DecideColumn,
    ops: ColumnOps,
    strip: int,
) -> None:
    """Decide the columns of one block again; ``out`` gets their new values and the differences."""
    decided_BR, moved_BR = out
    steps_1 = ops.columns(step_B.unsqueeze(-1))
    columns_R, each_R = ops.columns(rounded_BR), ops.columns(sums_BR)
    decided_R, moves_R = ops.columns(decided_BR), ops.columns(moved_BR)
    wanted_R = ops.scratch(rounded_BR[..., 0, :])
    scratch_SR = ops.scratch(rounded_BR[..., :strip, :])
    all_sums_BR, curves_BB = ops.view(sums_BR), ops.view(hessian_BB)
    width = rounded_BR.shape[-2]
    for lo in range(0, width, strip):
        hi = min(lo + strip, width)
        for b in range(lo, hi):
            column_R = columns_R[b]
            ops.multiply(each_R[b], steps_1[b], out=wanted_R)
            ops.subtract(column_R, wanted_R, out=wanted_R)
            round_column(wanted_R, b, decided_R[b])
            ops.subtract(column_R, decided_R[b], out=moves_R[b])
            if b + 1 < hi:
                rest_KR, row_K = all_sums_BR[..., b + 1 : hi, :], curves_BB[..., b, b + 1 : hi]
                ops.subtract_outer(rest_KR, row_K, moves_R[b], scratch_SR)
        subtract_product(sums_BR[..., hi:, :], hessian_BB[..., lo:hi, hi:], moved_BR[..., lo:hi, :])
    moved_BR.neg_()  # from old − new to the change of the sums


def _column_rounder(
    work_CR: Tensor, how: _Rounding, kept_CR: Tensor | None
) -> tuple[ColumnOps, DecideColumn]:
    """Operations on columns of ``work_CR``, and the function that rounds one to its own scale."""
    scales, grid = how.scales, how.grid
    ops = column_ops(work_CR, by_torch=grid.kind == "float")
    scale_GR = scales.scale_RG.mT.float().contiguous()
    scales_R = ops.columns(scale_GR)
    inverses_R = ops.columns(scale_GR.reciprocal())
    zeros_R = None
    if scales.zero_RG is not None:
        zeros_R = ops.columns(scales.zero_RG.mT.float().contiguous())
    group_of_column = scales.group_of_column_C.tolist()
    qmin, qmax = ops.number(grid.qmin), ops.number(grid.qmax)

    def round_int(w_R: Column, c: int, out_R: Column) -> None:
        g = group_of_column[c]
        ops.multiply(w_R, inverses_R[g], out=out_R)
        if zeros_R is not None:
            ops.add(out_R, zeros_R[g], out=out_R)
        ops.round(out_R, out=out_R)
        ops.clamp(out_R, qmin, qmax, out=out_R)
        if zeros_R is not None:
            ops.subtract(out_R, zeros_R[g], out=out_R)
        ops.multiply(out_R, scales_R[g], out=out_R)

    def round_float(w_R: Column, c: int, out_R: Column) -> None:
        g = group_of_column[c]
        q_R = torch.mul(w_R, inverses_R[g])
        if zeros_R is not None:
            q_R = grid.round(q_R.add_(zeros_R[g])).sub_(zeros_R[g])
        else:
            q_R = grid.round(q_R)
        torch.mul(q_R, scales_R[g], out=out_R)

    round_column = round_int if grid.kind == "int" else round_float
    if kept_CR is None:
        return ops, round_column
    kept_R = ops.columns(kept_CR)

    def round_kept(w_R: Column, c: int, out_R: Column) -> None:
        round_column(w_R, c, out_R)
        ops.multiply(out_R, kept_R[c], out=out_R)

    return ops, round_kept


class Refined(NamedTuple):
    """What a sweep has found, and :func:`refine` makes better."""

    rounded_RC: Tensor
    """Q, values on the grid, float32 ``[..., R, C]``."""
    loss_R: Tensor
    """½ tr(D H Dᵀ) of each row, D = Q - W: float32 ``[..., R]``."""
    scales: ColumnScales


def refine(
    found: Refined,
    weight_RC: Tensor,
    hessian_CC: Tensor,
    grid: Grid,
    *,
    dampening: float,
    rounds: int,
    stored: torch.dtype | None,
    kept_RC: Tensor | None = None,
    block: int = 128,
) -> Refined:
    """:func:`refit_scales`, and then ``rounds`` times :func:`coordinate_descent` and another fit.

    Codes are decided again for the scales that were fitted to them, and these fitted again, as in
    block coordinate descent over codes and scales: the loss of no row rises. ``stored`` is the
    dtype of scales; without it they stay.
    """
    found = _refitted(found, weight_RC, hessian_CC, dampening, stored)
    for _ in range(rounds):
        rounded_RC, changed_R = coordinate_descent(
            weight_RC,
            found.rounded_RC,
            hessian_CC,
            found.scales,
            grid,
            dampening=dampening,
            kept_RC=kept_RC,
            block=block,
        )
        found = found._replace(rounded_RC=rounded_RC, loss_R=found.loss_R + changed_R)
        found = _refitted(found, weight_RC, hessian_CC, dampening, stored)
    return found


def _refitted(
    found: Refined,
    weight_RC: Tensor,
    hessian_CC: Tensor,
    dampening: float,
    stored: torch.dtype | None,
) -> Refined:
    if stored is None:
        return found
    scale_RG, rounded_RC, changed_R = refit_scales(
        weight_RC, found.rounded_RC, hessian_CC, found.scales, stored=stored, dampening=dampening
    )
    scales = found.scales._replace(scale_RG=scale_RG)
    return Refined(rounded_RC, found.loss_R + changed_R, scales)


# --------------------
# Least-squares refit of scales to the codes of a weight.


def refit_scales(
    weight_RC: Tensor,
    rounded_RC: Tensor,
    hessian_CC: Tensor,
    scales: ColumnScales,
    *,
    stored: torch.dtype,
    dampening: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The scale of each group that best fits its codes, given the scales of all the others.

    A sweep rounds with scales that were chosen before it. With the codes V decided, Q = s V in a
    group g, and D = Q − W, the error ``tr(D H Dᵀ)`` is quadratic in the scale:

    .. math:: s_g \leftarrow s_g - \frac{V_g (H D^\top)_g}{V_g H_{gg} V_g^\top}

    Groups, which are of consecutive columns, are refitted from left to right, once. The error is
    that of the scale in the dtype ``stored``: if it is not smaller, or the scale is not positive,
    the old scale is kept.

    Returns:
        The scales, float32 ``[..., R, G]``; Q with these scales; the change of the loss of each row
        (never more than 0).
    """
    scale_RG = scales.scale_RG.float().clone()
    found_RC = rounded_RC.clone()
    saved_R = rounded_RC.new_zeros(rounded_RC.shape[:-1])
    columns = list(_spans(scales.group_of_column_C))
    added_1 = ridge(hessian_CC, dampening).unsqueeze(-1)

    def refit(span: slice) -> None:
        own_RG, own_RC = scale_RG[..., span, :], found_RC[..., span, :]
        change_RC = own_RC - weight_RC[..., span, :]
        for g, part in columns:
            saved_R[..., span] += _refit_group(
                own_RG[..., g], own_RC[..., part], change_RC, part, hessian_CC, added_1, stored
            )

    rows = rounded_RC.shape[-2]
    parallel_spans(refit, rows, rounded_RC.device, width=wide_span(rows))
    return scale_RG, found_RC, saved_R


def _refit_group(
    scale_R: Tensor,
    found_RK: Tensor,
    change_RC: Tensor,
    columns: slice,
    hessian_CC: Tensor,
    added_1: Tensor,
    stored: torch.dtype,
) -> Tensor:
    """Refit a group's scales, values and changes in place; return the change of the loss."""
    codes_RK = (found_RK / scale_R.unsqueeze(-1)).nan_to_num_()
    # H is symmetric, and its rows are contiguous
    change_RK, hessian_CK = change_RC[..., columns], hessian_CC[..., columns, :].mT
    slope_RK = matmul(change_RC, hessian_CK, fewest=OFTEN_ALIKE) + added_1 * change_RK
    bent_RK = matmul(codes_RK, hessian_CK[..., columns, :]) + added_1 * codes_RK
    slope_R = (slope_RK * codes_RK).sum(-1)
    curvature_R = (bent_RK * codes_RK).sum(-1)
    new_R = (scale_R - (slope_R / curvature_R).nan_to_num_(0, 0, 0)).to(stored).float()
    moved_R = new_R - scale_R
    gain_R = slope_R * moved_R + 0.5 * curvature_R * moved_R**2
    better_R = (gain_R < 0) & (new_R > 0)
    moved_R = moved_R.where(better_R, 0)
    scale_R += moved_R
    moved_RK = moved_R.unsqueeze(-1) * codes_RK
    found_RK += moved_RK
    change_RK += moved_RK
    return gain_R.where(better_R, 0)


def _spans(group_of_column_C: Tensor) -> Iterator[tuple[int, slice]]:
    """Each group with its columns as a slice, since indexing would copy."""
    lo = 0
    for g, members in itertools.groupby(group_of_column_C.tolist()):
        hi = lo + len(list(members))
        yield g, slice(lo, hi)
        lo = hi


def conditional_optimum(
    weight_RC: Tensor, rounded_RC: Tensor, hessian_CC: Tensor, *, dampening: float = 0.0
) -> Tensor:
    r"""The minimum of ``tr(D H Dᵀ)``, D = Q − W, over each single weight, given all other codes.

    .. math:: \tilde w_c = q_c - (D H)_c / H_{cc}

    Once :func:`coordinate_descent` has converged, each of them rounds to its own code; its distance
    from the middle between two codes determines the cost of the other code. Dampening has to be
    more than 0 if columns are dead. With a diagonal H it is the weight itself:

    >>> import torch
    >>> W, Q = torch.tensor([[0.4, 0.9]]), torch.tensor([[0.0, 1.0]])
    >>> conditional_optimum(W, Q, torch.eye(2))
    tensor([[0.4000, 0.9000]])
    """
    change_RC = rounded_RC - weight_RC
    added_1 = ridge(hessian_CC, dampening).unsqueeze(-1)
    slope_RC = matmul(change_RC, hessian_CC, fewest=OFTEN_ALIKE).addcmul_(change_RC, added_1)
    curvature_C = hessian_CC.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) + added_1
    return rounded_RC - slope_RC / curvature_C


# --------------------
# Asymmetric calibration: weights that correct the error of the compressed model's inputs.
#
# In the original model a Linear gets inputs X; in the compressed one, whose earlier layers are
# already rounded, it gets Y. Its target output is still W X. Minimizing
#
# .. math:: \lVert Y Q^\top - X W^\top \rVert_F^2  \qquad (\text{rows of } X, Y \text{ are tokens})
#
# over real-valued Q, with a ridge towards W, gives the weight to round instead of W:
#
# .. math:: W^* = W + \left[ (G + \lambda I)^{-1} C W^\top \right]^\top,
#       \qquad G = Y^\top Y,\; C = Y^\top (X - Y),\;
#       \lambda = \text{ridge} \cdot \operatorname{mean}(\operatorname{diag} G).
#
# The ordinary sweep of W* on G then does the rest. Compare GPTAQ (arXiv:2504.02692, Eq. 9) and
# Qronos (arXiv:2505.11695); the difference X − Y is accumulated, and not YᵀX, because it is small
# and YᵀX − YᵀY would cancel. With any residual E of the sum to which the outputs are added, YᵀE
# stands in place of C Wᵀ.


def ridge_for_tokens(ridge: float, gram_CC: Tensor, tokens: Sequence[int]) -> float | Tensor:
    """The ridge for a number of tokens of each Gram matrix: at least C / T.

    (G + λI)⁻¹C is a regression on C inputs from T tokens. With few tokens it fits their noise, and
    its variance grows with C / T.

    >>> import torch
    >>> ridge_for_tokens(0.05, torch.eye(4), [40]), ridge_for_tokens(0.05, torch.eye(4), [4000])
    (0.1, 0.05)
    """
    each = [max(ridge, gram_CC.shape[-1] / number) for number in tokens]
    return each[0] if gram_CC.ndim == 2 else gram_CC.new_tensor(each).unsqueeze(-1)


def corrected_weight(
    weight_RC: Tensor,
    gram_CC: Tensor,
    cross_CC: Tensor | None,
    ridge: float | Tensor,
    *,
    missing_CR: Tensor | None = None,
    steps: int = 4,
) -> Tensor:
    """The weight W* whose outputs on Y approximate those of W on X.

    Args:
        weight_RC: W.
        gram_CC: ``G = YᵀY``.
        cross_CC: ``C = Yᵀ(X − Y)``, float32 ``[..., C, C]``; rows belong to Y.
        ridge: the first λ as a fraction of the mean of the diagonal of G, more than 0; of each
            matrix ``[..., 1]``.
        missing_CR: ``YᵀE``, float32 ``[..., C, R]``, in place of the cross product.
        steps: number of λ to try, each ten times the one before.

    Raises:
        SingularHessianError: if ``G + λI`` is not positive definite for any of them.

    With X = Y there is no correction:

    >>> import torch
    >>> W, Y, E = torch.ones(1, 2), torch.eye(2), torch.tensor([[3.0], [6.0]])
    >>> corrected_weight(W, Y.T @ Y, Y.T @ (Y - Y), 0.01)
    tensor([[1., 1.]])
    >>> corrected_weight(0 * W, Y.T @ Y, None, 0.5, missing_CR=Y.T @ E).round(decimals=4)
    tensor([[2., 4.]])
    """
    for step in range(steps):
        lower_CC = cholesky(damp(gram_CC, ridge * 10**step), overwrite=True)
        if lower_CC is None:
            continue
        if missing_CR is not None:
            change_CR = missing_CR.clone()
        else:  # R right-hand sides instead of C: (G + λ)⁻¹ C Wᵀ, the product first
            assert cross_CC is not None
            change_CR = parallel_matmul(cross_CC, weight_RC.mT)
        return weight_RC + FactoredSolver(lower_CC).solve_(change_CR).mT
    raise SingularHessianError("The Gram matrix with its ridge is not positive definite.")
