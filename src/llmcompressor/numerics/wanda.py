# SPDX-License-Identifier: Apache-2.0
r"""Wanda: zero the weights whose products with their inputs are smallest.

Sun et al., arXiv:2306.11695, Eq. 1. With X the inputs (T tokens), the score of a weight is

.. math:: S_{rc} = |W_{rc}| \cdot \lVert X_c \rVert_2 / \sqrt T ,

and within each row, or each group of M weights of a row, those with the least score go. Nothing
else is changed. It is the choice that the output error asks for if inputs are uncorrelated: what a
row loses is then the sum of its S² alone.
"""

from __future__ import annotations

from torch import Tensor

from llmcompressor.numerics.masks import NofM
from llmcompressor.numerics.sparse_choice import keep_best_of_rows, least_of_groups

__all__ = ["wanda_keeps", "wanda_score"]


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
    """What stays, bool ``[..., R, C]``.

    Args:
        score_RC: of every weight, at least 0.
        sparsity: the share of each row that goes; without effect where there is a group.
        group: N zeros in each M neighbours of a row; ``None`` to compare within whole rows.
        gone_RC: bool, same shape: what is zero in any case, and counts.

    Of equal scores in a group the first go.

    >>> import torch
    >>> wanda_keeps(torch.tensor([[1.0, 4.0, 3.0, 2.0]]), 0.5, NofM(2, 4)).tolist()
    [[False, True, True, False]]
    """
    if group is None:
        return keep_best_of_rows(score_RC, sparsity, gone_RC)
    gone_CR = None if gone_RC is None else gone_RC.mT
    kept_RC = ~least_of_groups(score_RC.mT, group, gone_CR).mT
    return kept_RC if gone_RC is None else kept_RC & ~gone_RC
