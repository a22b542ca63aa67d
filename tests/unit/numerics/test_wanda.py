# SPDX-License-Identifier: Apache-2.0
"""Wanda's score and choice, choices by group, and the sparsities of layers."""

from __future__ import annotations

import random

import pytest
import torch

from llmcompressor.errors import InputError
from llmcompressor.numerics.masks import (
    LazyWeight,
    NofM,
    Share,
    Sparsity,
    grow_masks,
    keep_mask,
    keep_mask_by_group,
)
from llmcompressor.numerics.wanda import (
    outlier_count,
    owl_sparsities,
    wanda_mask,
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


@pytest.mark.parametrize("group", [None, NofM(2, 4), NofM(1, 4)])
@pytest.mark.parametrize("rows", [1, 128, 300])
def test_a_weight_pruned_by_parts_is_what_the_choice_leaves(rows: int, group: NofM | None) -> None:
    weight_RC, mean_square_C = torch.randn(rows, C).bfloat16(), torch.rand(C)
    pruned_RC, lost_R = wanda_prune(weight_RC, mean_square_C, 0.3, group)
    score_RC = wanda_score(weight_RC, mean_square_C)
    kept_RC = wanda_mask(score_RC, 0.3, group)
    assert torch.equal(pruned_RC, weight_RC.masked_fill(~kept_RC, 0))
    assert pruned_RC.dtype == torch.bfloat16
    torch.testing.assert_close(lost_R, (score_RC * ~kept_RC).square().sum(-1))


def test_columns_make_whole_groups() -> None:
    weight_RC, mean_square_C = torch.randn(3, 10), torch.rand(10)
    said = "10 columns do not make groups of 4, which 2:4 asks for"
    with pytest.raises(InputError, match=said):
        wanda_prune(weight_RC, mean_square_C, 0.5, NofM(2, 4))
    with pytest.raises(InputError, match=said):
        wanda_mask(wanda_score(weight_RC, mean_square_C), 0.5, NofM(2, 4))
    pruned_RC, _ = wanda_prune(weight_RC, mean_square_C, 0.5, NofM(1, 5))
    assert int((pruned_RC == 0).sum()) == 6


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.4, 1.0])
def test_every_row_loses_its_least(sparsity: float) -> None:
    score_RC = torch.rand(R, C)
    kept_RC = wanda_mask(score_RC, sparsity)
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
    assert torch.equal(wanda_mask(score_RC, 0.5, group), ~expected)
    found_CR = keep_mask_by_group(score_RC.T.contiguous(), group)
    assert torch.equal(found_CR.T, (~expected).float())


def test_a_share_loses_exactly_its_least() -> None:
    score_CR = torch.rand(C, R)
    sparsity = Sparsity((Share(5, 0.3), Share(7, 0.8)))
    kept_CR = keep_mask(score_CR, sparsity)
    for rows, share in sparsity.spans():
        score, kept = score_CR[:, rows].flatten(), kept_CR[:, rows].flatten()
        assert int((~kept).sum()) == round(share * kept.numel())
        assert float(score[~kept].max()) <= float(score[kept].min())


def test_what_is_gone_counts() -> None:
    score_RC, gone_RC = torch.rand(R, C), torch.rand(R, C) < 0.3
    for group in (None, NofM(2, 4)):
        kept_RC = wanda_mask(score_RC, 0.5, group, gone_RC=gone_RC)
        assert not bool(kept_RC[gone_RC].any())
        width = C if group is None else 4
        zeros = (~kept_RC).reshape(-1, width).sum(dim=1)
        expected = gone_RC.view(-1, width).sum(dim=1).clamp_min(width // 2)
        assert torch.equal(zeros, expected)


def test_outliers_are_counted_above_the_mean() -> None:
    score = torch.tensor([1.0, 1.0, 1.0, 9.0])
    assert outlier_count(score, 2.5, float(score.mean())) == 1
    assert outlier_count(score, 3.5, float(score.mean())) == 0


@pytest.mark.parametrize("target", [0.05, 0.5, 0.7, 0.98])
@pytest.mark.parametrize("spread", [0.0, 0.08, 0.3])
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


def test_layers_that_are_alike_get_the_target() -> None:
    assert owl_sparsities([0.1, 0.1], [3, 5], 0.6, 0.1) == [0.6, 0.6]
    assert owl_sparsities([0.1], [3], 0.6, 0.1) == [0.6]


def test_the_order_of_layers_does_not_matter() -> None:
    ratios, weights = [0.3, 0.1, 0.2], [10, 20, 30]
    found = owl_sparsities(ratios, weights, 0.5, 0.1)
    back = owl_sparsities(ratios[::-1], weights[::-1], 0.5, 0.1)
    assert found == pytest.approx(back[::-1])


@pytest.mark.parametrize("ratios", [[0.0, 0.25, 0.5, 0.75, 1.0], [0.3, 0.1, 0.5], [0.1, 0.9]])
def test_where_no_layer_is_at_a_bound_it_is_the_papers_formula(ratios: list[float]) -> None:
    """S + mean d - d_i, d_i = 2 lambda (D_i - min) / (max - min), of layers of one size."""
    target, spread = 0.6, 0.08
    low, high = min(ratios), max(ratios)
    shares = [2 * spread * (ratio - low) / (high - low) for ratio in ratios]
    expected = [target + sum(shares) / len(shares) - share for share in shares]
    assert owl_sparsities(ratios, [7] * len(ratios), target, spread) == pytest.approx(expected)


def test_what_a_bound_takes_away_moves_the_others_alike() -> None:
    ratios, target, spread = [0.02, 0.05, 0.03, 0.08, 0.01, 0.04], 0.6, 0.08
    found = owl_sparsities(ratios, [7] * 6, target, spread)
    inside = [
        one + 2 * spread * ratio / 0.07
        for one, ratio in zip(found, ratios, strict=True)
        if abs(one - target) < spread - 1e-9
    ]
    assert 2 < len(inside) < 6
    assert inside == pytest.approx([inside[0]] * len(inside))


def test_outliers_are_those_of_a_loop() -> None:
    score = torch.rand(R, C, generator=torch.Generator().manual_seed(0)) ** 8
    mean = float(score.mean())
    for multiple in (0.0, 1.0, 3.0, 5.0, 100.0):
        expected = sum(one > multiple * mean for one in score.flatten().tolist())
        assert outlier_count(score, multiple, mean) == expected
