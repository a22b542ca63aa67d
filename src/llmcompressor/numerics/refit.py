# SPDX-License-Identifier: Apache-2.0
"""Least-squares refit of scales to the codes of a weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from llmcompressor.numerics.gptq import ColumnScales
from llmcompressor.numerics.hessian import ridge
from llmcompressor.numerics.products import OFTEN_ALIKE, matmul
from llmcompressor.threads import each_span, wide_span

__all__ = ["refit_scales"]


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

    Groups are refitted from left to right, once. The error is that of the stored scale: if it is
    not smaller, or the scale is not positive, the old scale is kept.

    Args:
        weight_RC: W, the unrounded weight, float32 ``[..., R, C]``.
        rounded_RC: Q, values on the grid, float32 ``[..., R, C]``; not changed.
        hessian_CC: H, float32 ``[..., C, C]``.
        scales: scale and zero point of every row and column; groups of consecutive columns.
        stored: the dtype in which scales are stored.
        dampening: added to the diagonal of H, as a fraction of its mean.

    Returns:
        The scales, float32 ``[..., R, G]``; the dequantized weight with these scales; the change of
        the loss of each row (never more than 0).
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
    each_span(refit, rows, rounded_RC.device, width=wide_span(rows))
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
