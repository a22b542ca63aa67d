# SPDX-License-Identifier: Apache-2.0
"""Selection of the weights to keep by score, with an exact number of zeros.

Scores are transposed (``[..., C, R]``), as the solvers hold a weight, and the rows of several
weights may be stacked: each of them (a :class:`Share`) has its own sparsity.

Shapes: R rows, C columns; M weights of a group, N of them zero; S rows of one share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.errors import InputError
from llmcompressor.numerics.masks import NofM, zeros_of
from llmcompressor.numerics.selection import Pool, find_cut, take

__all__ = [
    "Share",
    "Sparsity",
    "keep_best",
    "keep_best_of_groups",
    "keep_best_of_rows",
]


@dataclass(frozen=True)
class Share:
    """Some rows of a stack, and the fraction of their weights that is to be zero."""

    rows: int
    sparsity: float


@dataclass(frozen=True)
class Sparsity:
    """The target sparsity of a stack of weights.

    Attributes:
        shares: sparsities of its rows, from the first on.
        group: N zeros in each M consecutive weights of a row, overriding the shares; ``None`` for
            zeros anywhere.
    """

    shares: tuple[Share, ...]
    group: NofM | None = None

    def spans(self) -> Iterator[tuple[slice, float]]:
        """The rows of each share, and its sparsity."""
        start = 0
        for share in self.shares:
            yield slice(start, start + share.rows), share.sparsity
            start += share.rows

    def zeros(self, columns: int) -> list[int]:
        """Number of zeros of each share in its first ``columns``."""
        return [zeros_of(share.sparsity, share.rows * columns) for share in self.shares]


def keep_best(
    score_CR: Tensor,
    sparsity: Sparsity,
    *,
    gone_CR: Tensor | None = None,
    budgets: Sequence[int] | None = None,
) -> Tensor:
    """Keep the weights with the highest scores in each share, or in each group of it.

    Args:
        score_CR: at least 0 and finite, float32 ``[..., C, R]``.
        sparsity: the number of weights to remove.
        gone_CR: bool, same shape: weights that are zero in any case, included in the number.
        budgets: number of weights to remove of each share, for every member of a batch; by default
            from ``sparsity``.

    Returns:
        Bool ``[..., C, R]``, true for kept weights. Of equal scores the first in memory are
        removed.

    >>> score = torch.tensor([[3.0], [1.0], [2.0], [4.0]])
    >>> keep_best(score, Sparsity((Share(1, 0.5),), NofM(2, 4))).flatten().tolist()
    [True, False, False, True]
    """
    if sparsity.group is not None:
        return keep_best_of_groups(score_CR, sparsity.group, gone_CR).bool()
    kept_CR = torch.empty_like(score_CR, dtype=torch.bool)
    if budgets is None:
        budgets = sparsity.zeros(score_CR.shape[-2])
    flat = (-1, *score_CR.shape[-2:])
    gone_BCR = None if gone_CR is None else gone_CR.view(flat)
    pairs = zip(score_CR.reshape(flat), kept_CR.view(flat), strict=True)
    for batch, (each_CR, kept) in enumerate(pairs):
        for (rows, _), budget in zip(sparsity.spans(), budgets, strict=True):
            score_CS = each_CR[:, rows]
            free_CS = torch.ones_like(score_CS, dtype=torch.bool)
            if gone_BCR is not None:
                free_CS = ~gone_BCR[batch, :, rows]
                budget -= free_CS.numel() - int(free_CS.sum())  # noqa: PLW2901 - what is left
            kept[:, rows] = free_CS & ~_least(score_CS, free_CS, budget)
    return kept_CR


def _least(score_CS: Tensor, free_CS: Tensor, budget: int) -> Tensor:
    pool = Pool(score_CS, free_CS)
    return take(pool, find_cut(lambda: [pool], budget, torch.float32))[0]


def keep_best_of_rows(score_RC: Tensor, sparsity: float, gone_RC: Tensor | None = None) -> Tensor:
    """Keep the weights with the highest scores in each row; every row loses equally many.

    Args:
        score_RC: at least 0, ``[..., R, C]``.
        sparsity: the fraction of a row that is to be zero.
        gone_RC: bool, same shape: weights that are zero in any case, included in the number.

    >>> keep_best_of_rows(torch.tensor([[3.0, 1.0], [5.0, 6.0]]), 0.5).tolist()
    [[True, False], [False, True]]
    """
    if gone_RC is not None:
        score_RC = score_RC.masked_fill(gone_RC, -1)
    zeros = zeros_of(sparsity, score_RC.shape[-1])
    least_RZ = score_RC.topk(zeros, dim=-1, largest=False, sorted=False).indices
    kept_RC = torch.ones_like(score_RC, dtype=torch.bool).scatter_(-1, least_RZ, False)
    return kept_RC if gone_RC is None else kept_RC & ~gone_RC


def keep_best_of_groups(score_CR: Tensor, group: NofM, gone_CR: Tensor | None = None) -> Tensor:
    """Mask of 1 for kept weights: all but the N lowest scores of each group of M columns.

    Of equal scores the first are removed. Computed by M (M - 1) / 2 comparisons of whole columns,
    which needs no sorting and reads memory in order. The mask is numeric and not bool, since a CPU
    vectorizes only numbers here.

    Args:
        score_CR: at least 0, floating ``[..., C, R]``; M divides C.
        group: N and M.
        gone_CR: bool, same shape: ranked below every other weight, and never kept.

    Returns:
        0 and 1 in the dtype of ``score_CR``, ``[..., C, R]``.

    Raises:
        InputError: M does not divide the columns.

    >>> score = torch.tensor([[3.0], [1.0], [2.0], [4.0]])
    >>> keep_best_of_groups(score, NofM(2, 4)).flatten().tolist()
    [1.0, 0.0, 0.0, 1.0]
    """
    M, C = group.group, score_CR.shape[-2]
    if C % M:
        raise InputError(
            f"{C} columns do not make groups of {M}, which {group.zeros}:{M} asks for.",
            "Leave this weight out, or choose groups whose size divides its columns.",
        )
    if gone_CR is not None:
        score_CR = score_CR.masked_fill(gone_CR, -1)
    score_GMR = score_CR.reshape(*score_CR.shape[:-2], -1, M, score_CR.shape[-1])
    rank_GMR = torch.empty_like(score_GMR)
    each_GR, ranks_GR = score_GMR.unbind(-2), rank_GMR.unbind(-2)
    for number, rank_GR in enumerate(ranks_GR):
        rank_GR.fill_(M - 1 - number)  # as if it were before all that follow
    behind_GR = torch.empty_like(each_GR[0])
    for later in range(1, M):
        for earlier in range(later):
            torch.le(each_GR[earlier], each_GR[later], out=behind_GR)
            ranks_GR[later].add_(behind_GR)
            ranks_GR[earlier].sub_(behind_GR)
    kept_CR = rank_GMR.ge_(group.zeros).flatten(-3, -2)
    return kept_CR if gone_CR is None else kept_CR.mul_(~gone_CR)
