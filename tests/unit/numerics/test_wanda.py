# SPDX-License-Identifier: Apache-2.0
"""Wanda's score and choice, choices by group, and the sparsities of layers."""

from __future__ import annotations

import random

import pytest
import torch
from tests.support.pairs import each

from llmcompressor.numerics.masks import (
    LazyWeight,
    NofM,
    grow_masks,
    keep_mask_by_group,
    keep_mask_by_row,
)
from llmcompressor.numerics.wanda import (
    owl_sparsities,
    wanda_prune,
    wanda_score,
)

R, C = 12, 32


def test_the_score_is_magnitude_times_norm() -> None:
    weight_RC, inputs_TC = torch.randn(R, C), torch.randn(100, C)
    score_RC = wanda_score(weight_RC, inputs_TC.square().mean(dim=0))
    for r in range(R):
        for c in range(C):
            expected = abs(float(weight_RC[r, c])) * float(inputs_TC[:, c].norm()) / 10
            assert float(score_RC[r, c]) == pytest.approx(expected, rel=1e-4)


def test_of_columns_without_inputs_the_largest_weights_stay() -> None:
    weight_RC = torch.tensor([[1.0, -4.0, 3.0, 2.0]])
    pruned_RC, _ = wanda_prune(weight_RC, torch.tensor([0.0, 0.0, 0.0, 1.0]), 0.5)
    assert pruned_RC.tolist() == [[0.0, -4.0, 0.0, 2.0]]


@pytest.mark.parametrize("group", [None, NofM(2, 4), NofM(1, 4)])
@pytest.mark.parametrize("rows", [1, 128, 300])
def test_a_weight_pruned_by_parts_is_what_the_choice_leaves(rows: int, group: NofM | None) -> None:
    weight_RC, mean_square_C = torch.randn(rows, C).bfloat16(), torch.rand(C)
    pruned_RC, lost_R = wanda_prune(weight_RC, mean_square_C, 0.3, group)
    score_RC = wanda_score(weight_RC, mean_square_C)
    kept_RC = (
        keep_mask_by_row(score_RC, 0.3)
        if group is None
        else keep_mask_by_group(score_RC.T, group).T.bool()
    )
    assert torch.equal(pruned_RC, weight_RC.masked_fill(~kept_RC, 0))
    assert pruned_RC.dtype == torch.bfloat16
    torch.testing.assert_close(lost_R, (score_RC * ~kept_RC).square().sum(-1))


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.4, 1.0])
def test_every_row_loses_its_least(sparsity: float) -> None:
    score_RC = torch.rand(R, C)
    kept_RC = keep_mask_by_row(score_RC, sparsity)
    zeros = round(sparsity * C)
    for score_C, kept_C in zip(score_RC, kept_RC, strict=True):
        order = score_C.argsort()
        assert not bool(kept_C[order[:zeros]].any())
        assert bool(kept_C[order[zeros:]].all())


@pytest.mark.parametrize("group", [NofM(2, 4), NofM(1, 4), NofM(3, 4), NofM(4, 8), NofM(1, 2)])
@pytest.mark.parametrize("ties", [False, True])
def test_groups_are_those_of_pruning_over_time(group: NofM, ties: bool) -> None:
    score_RC = torch.rand(R, C)
    if ties:
        score_RC = (score_RC * 3).floor()
    expected = next(grow_masks([LazyWeight.of(score_RC)], group, group.zeros / group.group))
    found_CR = keep_mask_by_group(score_RC.T.contiguous(), group)
    assert torch.equal(found_CR.T, (~expected).float())


@each(target=[0.05, 0.5, 0.7, 0.98], spread=[0.0, 0.08, 0.3])
def test_sparsities_keep_their_mean_and_their_bounds(target: float, spread: float) -> None:
    source = random.Random(0)
    ratios = [source.random() ** 4 for _ in range(20)]
    weights = [source.randrange(1, 1000) for _ in ratios]
    found = owl_sparsities(ratios, weights, target, spread)
    mean = sum(one * weight for one, weight in zip(found, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(target, abs=1e-9)
    assert max(found) <= min(1.0, target + spread) + 1e-12
    assert min(found) >= max(0.0, target - spread) - 1e-12
    by_ratio = [one for _, one in sorted(zip(ratios, found, strict=True))]
    assert by_ratio == sorted(by_ratio, reverse=True)


@pytest.mark.parametrize("ratios", [[0.0, 0.25, 0.5, 0.75, 1.0], [0.3, 0.1, 0.5], [0.1, 0.9]])
def test_where_no_layer_is_at_a_bound_it_is_the_papers_formula(ratios: list[float]) -> None:
    """S + mean d - d_i, d_i = 2 lambda (D_i - min) / (max - min), of layers of one size."""
    target, spread = 0.6, 0.08
    low, high = min(ratios), max(ratios)
    shares = [2 * spread * (ratio - low) / (high - low) for ratio in ratios]
    expected = [target + sum(shares) / len(shares) - share for share in shares]
    assert owl_sparsities(ratios, [7] * len(ratios), target, spread) == pytest.approx(expected)
