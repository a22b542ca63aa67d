# SPDX-License-Identifier: Apache-2.0
r"""Wanda: zero the weights whose products with their inputs are smallest.

Sun et al., arXiv:2306.11695, Eq. 1. With X the inputs (T tokens), the score of a weight is

.. math:: S_{rc} = |W_{rc}| \cdot \lVert X_c \rVert_2 / \sqrt T ,

and within each row, or each group of M weights of a row, those with the least score are removed. No
other weight changes. This is the choice with the least output error if inputs are uncorrelated: the
error of a row is then the sum of its S² alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcompressor.numerics.hessian import fill_dead_columns
from llmcompressor.numerics.masks import NofM, keep_mask_by_group, keep_mask_by_row
from llmcompressor.runtime.threads import parallel_spans

_ROWS = 128
"""Rows that are compared at once: what is made of them stays in a processor's cache."""


def wanda_score(weight_RC: Tensor, mean_square_C: Tensor) -> Tensor:
    """The score of every weight, of any floating dtype: float32 ``[..., R, C]``.

    ``mean_square_C`` is the mean of the squares of each input column, float32 ``[..., C]``. A dead
    column counts as in :mod:`llmcompressor.numerics.hessian`.
    """
    norm_C = fill_dead_columns(mean_square_C).sqrt()
    return weight_RC.float().abs().mul_(norm_C.unsqueeze(-2))


def wanda_prune(
    weight_RC: Tensor, mean_square_C: Tensor, sparsity: float, group: NofM | None = None
) -> tuple[Tensor, Tensor]:
    """The pruned weight as a new tensor, and the error of each row.

    Args:
        weight_RC: any floating dtype ``[R, C]``.
        mean_square_C: mean of the squares of each input column, float32 ``[C]``.
        sparsity: the fraction of each row to remove; unused with a group.
        group: N zeros in each M consecutive weights of a row; ``None`` to compare whole rows.

    Returns:
        The weight; Σ S² of the removed weights, float32 ``[R]``.

    Raises:
        InputError: M does not divide the columns.

    >>> weight = torch.tensor([[1.0, -4.0, 3.0, -2.0]])
    >>> wanda_prune(weight, torch.tensor([1.0, 1.0, 1.0, 4.0]), 0.5)
    (tensor([[ 0., -4.,  0., -2.]]), tensor([10.]))
    """
    rows = len(weight_RC)
    pruned_RC = torch.empty_like(weight_RC)
    lost_R = mean_square_C.new_empty(rows)

    def prune(span: slice) -> None:
        part_PC = weight_RC[span]
        score_PC = wanda_score(part_PC, mean_square_C)
        if group is None:
            kept_PC = keep_mask_by_row(score_PC, sparsity).to(score_PC.dtype)
        else:
            # transposed in memory too: comparing adjacent members of a group is not vectorized
            kept_PC = keep_mask_by_group(score_PC.mT.contiguous(), group).mT.contiguous()
        torch.mul(part_PC, kept_PC.to(part_PC.dtype), out=pruned_RC[span]).add_(0.0)  # not -0.0
        lost_R[span] = score_PC.mul_(kept_PC.sub_(1)).square_().sum(-1)

    parallel_spans(prune, rows, weight_RC.device, width=_ROWS)
    return pruned_RC, lost_R


# --------------------
# OWL: per-layer sparsities, lower for layers with more outliers.
#
# Yin et al., arXiv:2310.05175, Eq. 1 and Sec. 3.2. With A the scores of all weights of a layer
# (:func:`~llmcompressor.numerics.wanda.wanda_score`) and A̅ their mean, the layer's outlier ratio
# is
#
# .. math:: D = \frac{|\{A_{rc} > M \bar A\}|}{R\,C} .
#
# Ratios are scaled to a range of 2λ, the sparsity of a layer falls as its ratio rises, and the
# mean over all weights is the target S:
#
# .. math:: s_i = S + \overline d - d_i, \qquad d_i = 2\lambda\,\frac{D_i - \min D}{\max D - \min
# D} .
#
# Here each s is also clamped to S ± λ and to [0, 1], and the difference is distributed over the
# layers that are not at a bound, so that the mean, weighted by parameters, is S.

_HALVINGS = 200


def outlier_count(score: Tensor, multiple: float, mean: float) -> int:
    """Number of scores above ``multiple`` times the mean of their layer.

    >>> import torch
    >>> outlier_count(torch.tensor([1.0, 1.0, 1.0, 5.0]), multiple=2.0, mean=2.0)
    1
    """
    return int((score > multiple * mean).sum())


def owl_sparsities(
    ratios: Sequence[float], weights: Sequence[int], target: float, spread: float
) -> list[float]:
    """The sparsity of each layer.

    Args:
        ratios: D of each layer.
        weights: parameters of each layer.
        target: S, in [0, 1].
        spread: λ, at least 0.

    >>> [round(s, 6) for s in owl_sparsities([0.0, 0.1], [100, 100], 0.5, 0.08)]
    [0.58, 0.42]
    """
    least, most = min(ratios), max(ratios)
    if most == least or spread == 0:
        return [target] * len(ratios)
    keeps = [2 * spread * (ratio - least) / (most - least) for ratio in ratios]
    low, high = max(0.0, target - spread), min(1.0, target + spread)

    def clipped(shift: float) -> list[float]:
        return [min(high, max(low, shift - keep)) for keep in keeps]

    def mean(shift: float) -> float:
        total = sum(one * weight for one, weight in zip(clipped(shift), weights, strict=True))
        return total / sum(weights)

    # The mean increases with the shift: from low, where all are at the lower bound, to high.
    below, above = low, high + 2 * spread
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        below, above = (middle, above) if mean(middle) < target else (below, middle)
    return clipped(above)
