# SPDX-License-Identifier: Apache-2.0
r"""Wanda: zero the weights whose products with their inputs are smallest.

Sun et al., arXiv:2306.11695, Eq. 1. With X the inputs (T tokens), the score of a weight is

.. math:: S_{rc} = |W_{rc}| \cdot \lVert X_c \rVert_2 / \sqrt T ,

and within each row, or each group of M weights of a row, those with the least score go. Nothing
else is changed. It is the choice that the output error asks for if inputs are uncorrelated: what a
row loses is then the sum of its S² alone.
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
    return _kept_of_groups(score_RC, group, gone_RC).bool()


def _kept_of_groups(score_RC: Tensor, group: NofM, gone_RC: Tensor | None = None) -> Tensor:
    """1 for what stays, else 0, as ``score_RC``."""
    gone_CR = None if gone_RC is None else gone_RC.mT
    # turned in memory too: members of a group that lie side by side are compared one at a time
    return keep_best_of_groups(score_RC.mT.contiguous(), group, gone_CR).mT.contiguous()


def wanda_prune(
    weight_RC: Tensor, mean_square_C: Tensor, sparsity: float, group: NofM | None = None
) -> tuple[Tensor, Tensor]:
    """The weight without what scores least, and what each row loses by that.

    Args:
        weight_RC: any floating dtype ``[R, C]``; not changed.
        mean_square_C: mean of the squares of each input column, float32 ``[C]``.
        sparsity: the share of each row that goes; without effect where there is a group.
        group: N zeros in each M neighbours of a row; ``None`` to compare within whole rows.

    Returns:
        A new tensor like ``weight_RC``; Σ S² of what is gone, float32 ``[R]``.

    Raises:
        InputError: the columns do not make whole groups.

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
