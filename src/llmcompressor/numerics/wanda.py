# SPDX-License-Identifier: Apache-2.0
r"""Wanda: zero the weights whose products with their inputs are smallest.

Sun et al., arXiv:2306.11695, Eq. 1. With X the inputs (T tokens), the score of a weight is

.. math:: S_{rc} = |W_{rc}| \cdot \lVert X_c \rVert_2 / \sqrt T ,

and within each row, or each group of M weights of a row, those with the least score are removed. No
other weight changes. This is the choice with the least output error if inputs are uncorrelated: the
error of a row is then the sum of its S² alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.numerics.masks import NofM
from llmcompressor.numerics.sparse_choice import keep_best_of_groups, keep_best_of_rows
from llmcompressor.threads import each_span

__all__ = ["wanda_keeps", "wanda_prune", "wanda_score"]

_ROWS = 128
"""Rows that are compared at once: what is made of them stays in a processor's cache."""


def wanda_score(weight_RC: Tensor, mean_square_C: Tensor) -> Tensor:
    """The score of every weight, float32 ``[..., R, C]``.

    Args:
        weight_RC: any floating dtype.
        mean_square_C: mean of the squares of each input column, float32 ``[..., C]``.
    """
    return weight_RC.float().abs().mul_(mean_square_C.sqrt().unsqueeze(-2))


def wanda_keeps(
    score_RC: Tensor,
    sparsity: float,
    group: NofM | None = None,
    *,
    gone_RC: Tensor | None = None,
) -> Tensor:
    """Mask of the kept weights, bool ``[..., R, C]``.

    Args:
        score_RC: of every weight, at least 0.
        sparsity: the fraction of each row to remove; unused with a group.
        group: N zeros in each M consecutive weights of a row; ``None`` to compare whole rows.
        gone_RC: bool, same shape: weights that are zero in any case, included in the number.

    Of equal scores in a group the first are removed.

    >>> import torch
    >>> wanda_keeps(torch.tensor([[1.0, 4.0, 3.0, 2.0]]), 0.5, NofM(2, 4)).tolist()
    [[False, True, True, False]]
    """
    if group is None:
        return keep_best_of_rows(score_RC, sparsity, gone_RC)
    return _kept_of_groups(score_RC, group, gone_RC).bool()


def _kept_of_groups(score_RC: Tensor, group: NofM, gone_RC: Tensor | None = None) -> Tensor:
    """Mask of 1 for kept weights, else 0, in the dtype of ``score_RC``."""
    gone_CR = None if gone_RC is None else gone_RC.mT
    # transposed in memory too: comparing adjacent members of a group is not vectorized
    return keep_best_of_groups(score_RC.mT.contiguous(), group, gone_CR).mT.contiguous()


def wanda_prune(
    weight_RC: Tensor, mean_square_C: Tensor, sparsity: float, group: NofM | None = None
) -> tuple[Tensor, Tensor]:
    """The pruned weight, and the error of each row.

    Args:
        weight_RC: any floating dtype ``[R, C]``; not changed.
        mean_square_C: mean of the squares of each input column, float32 ``[C]``.
        sparsity: the fraction of each row to remove; unused with a group.
        group: N zeros in each M consecutive weights of a row; ``None`` to compare whole rows.

    Returns:
        A new tensor like ``weight_RC``; Σ S² of the removed weights, float32 ``[R]``.

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
            kept_PC = keep_best_of_rows(score_PC, sparsity).to(score_PC.dtype)
        else:
            kept_PC = _kept_of_groups(score_PC, group)
        torch.mul(part_PC, kept_PC.to(part_PC.dtype), out=pruned_RC[span]).add_(0.0)  # not -0.0
        lost_R[span] = score_PC.mul_(kept_PC.sub_(1)).square_().sum(-1)

    each_span(prune, rows, weight_RC.device, width=_ROWS)
    return pruned_RC, lost_R
