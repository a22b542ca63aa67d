# SPDX-License-Identifier: Apache-2.0
"""What is kept, against a loop over shares, rows and groups; and when nothing or all goes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.masks import (
    NofM,
    Share,
    Sparsity,
    keep_mask,
    keep_mask_by_group,
    keep_mask_by_row,
    num_zeros,
)

B, C, R = 3, 24, 10
SHARES = Sparsity((Share(4, 0.25), Share(6, 0.7)))
GROUPS = [NofM(2, 4), NofM(1, 3), NofM(5, 8)]


def least(scores: list[float], gone: list[bool], zeros: int) -> list[bool]:
    """What stays of some weights: those that are gone count, and of equals the first go."""
    kept = [not one for one in gone]
    left = zeros - sum(gone)
    order = sorted((one for one in range(len(scores)) if kept[one]), key=lambda i: (scores[i], i))
    for place in order[: max(left, 0)]:
        kept[place] = False
    return kept


def problem(share_gone: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    score_BCR = (torch.rand(B, C, R, generator=generator) * 8).floor()  # many ties
    return score_BCR, torch.rand(B, C, R, generator=generator) < share_gone


@pytest.mark.parametrize("share_gone", [0.0, 0.2, 0.9, 1.0])
def test_each_share_of_each_member_of_a_batch_loses_its_least(share_gone: float) -> None:
    score_BCR, gone_BCR = problem(share_gone)
    kept_BCR = keep_mask(score_BCR, SHARES, gone_CR=gone_BCR if share_gone else None)
    for score_CR, gone_CR, kept_CR in zip(score_BCR, gone_BCR, kept_BCR, strict=True):
        for rows, share in SHARES.spans():
            score, gone = score_CR[:, rows].flatten().tolist(), gone_CR[:, rows].flatten().tolist()
            expected = least(score, gone, num_zeros(share, len(score)))
            assert kept_CR[:, rows].flatten().tolist() == expected


@pytest.mark.parametrize("share_gone", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("group", GROUPS)
def test_each_group_loses_its_least(group: NofM, share_gone: float) -> None:
    score_BCR, gone_BCR = problem(share_gone)
    kept_BCR = keep_mask_by_group(score_BCR, group, gone_BCR if share_gone else None)
    by_share = keep_mask(score_BCR, Sparsity((Share(R, 0.1),), group), gone_CR=gone_BCR)
    assert torch.equal(by_share, kept_BCR.bool())
    for batch in range(B):
        for row in range(R):
            for start in range(0, C, group.group):
                part = slice(start, start + group.group)
                score, gone = (
                    one[batch, part, row].tolist() for one in (score_BCR, gone_BCR.float())
                )
                expected = least(score, [bool(one) for one in gone], group.zeros)
                assert kept_BCR[batch, part, row].bool().tolist() == expected


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("share_gone", [0.0, 0.2])
def test_each_row_loses_its_least(sparsity: float, share_gone: float) -> None:
    """Without ties: which of equals go is not said."""
    score_RC = torch.randperm(R * C, generator=torch.Generator().manual_seed(2)).view(R, C).float()
    gone_RC = torch.rand(R, C, generator=torch.Generator().manual_seed(3)) < share_gone
    kept_RC = keep_mask_by_row(score_RC, sparsity, gone_RC if share_gone else None)
    for score_C, gone_C, kept_C in zip(score_RC, gone_RC, kept_RC, strict=True):
        expected = least(score_C.tolist(), gone_C.tolist(), num_zeros(sparsity, C))
        assert kept_C.tolist() == expected
