# SPDX-License-Identifier: Apache-2.0
"""The choice by splitting and the values by conjugate gradients, against direct solutions."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from tests.support.pairs import pairs
from torch import Tensor

from llmcompressor.numerics.hessian import damp, upper_factor
from llmcompressor.numerics.masks import NofM, Share, Sparsity
from llmcompressor.numerics.sparse_fit import refit, sparse_fit
from llmcompressor.numerics.sparsegpt import sparse_sweep

R, C = 24, 64
PAIRS = NofM(2, 4)


def problem(seed: int = 0, columns: int = C) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    weight_RC = torch.randn(R, columns)
    mixing_CC = torch.randn(columns, columns) * torch.logspace(0, -1, columns).unsqueeze(-1)
    inputs_TC = torch.randn(4 * columns, columns) @ mixing_CC
    return weight_RC, inputs_TC.T @ inputs_TC


def loss_of(changed_RC: Tensor, weight_RC: Tensor, hessian_CC: Tensor) -> float:
    change_RC = (changed_RC - weight_RC).double()
    return 0.5 * float(((change_RC @ damp(hessian_CC, 0.01).double()) * change_RC).sum())


def least_squares(weight_RC: Tensor, hessian_CC: Tensor, kept_RC: Tensor) -> Tensor:
    """Row by row: ``H_KK q_K = H_K: w``, K what is kept."""
    hessian_CC = damp(hessian_CC, 0.01).double()
    found_RC = torch.zeros_like(weight_RC)
    for row, kept in enumerate(kept_RC):
        right = hessian_CC[kept] @ weight_RC[row].double()
        found_RC[row, kept] = torch.linalg.solve(hessian_CC[kept][:, kept], right).float()
    return found_RC


@pytest.mark.parametrize("group", [None, PAIRS])
def test_the_values_are_those_of_least_squares(group: NofM | None) -> None:
    weight_RC, hessian_CC = problem()
    sparsity = Sparsity((Share(R, 0.5),), group)
    found = sparse_fit(weight_RC, hessian_CC, sparsity, steps=60)
    expected_RC = least_squares(weight_RC, hessian_CC, found.kept_RC)
    torch.testing.assert_close(found.weight_RC, expected_RC, rtol=1e-3, atol=1e-3)
    expected = loss_of(expected_RC, weight_RC, hessian_CC)
    assert float(found.loss_R.sum()) == pytest.approx(expected, rel=1e-3)
    for steps, most in ((2, 1.25), (3, 1.15), (6, 1.05)):
        few = sparse_fit(weight_RC, hessian_CC, sparsity, steps=steps)
        assert float(few.loss_R.sum()) < most * expected


def split_slowly(
    weight_CR: Tensor, hessian_CC: Tensor, penalties: list[float], relaxation: float
) -> Tensor:
    """What is kept by 2:4 after the rounds of the equations, each with its own solution."""

    def projected(values_CR: Tensor) -> Tensor:
        kept_CR = torch.zeros_like(values_CR)
        for row in range(values_CR.shape[1]):
            for lo in range(0, values_CR.shape[0], 4):
                best = values_CR[lo : lo + 4, row].abs().topk(2).indices
                kept_CR[lo + best, row] = values_CR[lo + best, row]
        return kept_CR

    split_CR, press_CR = projected(weight_CR), torch.zeros_like(weight_CR)
    for penalty in penalties:
        right_CR = hessian_CC @ weight_CR + penalty * split_CR - press_CR
        pressed_CC = hessian_CC + penalty * torch.eye(len(hessian_CC), dtype=torch.float64)
        free_CR = torch.linalg.solve(pressed_CC, right_CR)
        relaxed_CR = relaxation * free_CR + (1 - relaxation) * split_CR
        split_CR = projected(relaxed_CR + press_CR / penalty)
        press_CR = press_CR + penalty * (relaxed_CR - split_CR)
    return projected(free_CR + hessian_CC @ (weight_CR - free_CR)) != 0


@pytest.mark.parametrize(
    ("penalties", "relaxation"),
    [
        ([0.8] * 3, 1.8),
        ([0.4] * 3 + [0.8] * 3, 1.8),
        ([0.2 * 4 ** (number // 3 / 3) for number in range(12)], 1.5),
    ],
    ids=["one factor", "two factors", "four factors"],
)
def test_the_choice_is_that_of_the_equations(penalties: list[float], relaxation: float) -> None:
    weight_RC, hessian_CC = problem()
    damped_CC = damp(hessian_CC, 0.01).double()
    scale_C1 = damped_CC.diagonal().sqrt().unsqueeze(-1)
    scaled_CC = damped_CC / scale_C1 / scale_C1.T
    expected_CR = split_slowly(weight_RC.double().T * scale_C1, scaled_CC, penalties, relaxation)
    sparsity = Sparsity((Share(R, 0.5),), PAIRS)
    found = sparse_fit(weight_RC, hessian_CC, sparsity, rounds=len(penalties))
    assert float((expected_CR == found.kept_RC.T).double().mean()) > 0.995


def test_it_comes_close_to_the_best_of_all_choices() -> None:
    """Eight columns in two groups of four: 36 choices for each row, all tried."""
    weight_RC, hessian_CC = problem(columns=8)
    best_R = torch.full((R,), torch.inf)
    pairs = list(combinations(range(4), 2))
    for first in pairs:
        for second in pairs:
            kept_C = torch.ones(8, dtype=torch.bool)
            kept_C[list(first)] = False
            kept_C[[4 + one for one in second]] = False
            kept_RC = kept_C.expand(R, 8)
            tried = refit(weight_RC, weight_RC * kept_RC, hessian_CC, kept_RC, steps=16)
            best_R = torch.minimum(best_R, tried.loss_R)
    sparsity = Sparsity((Share(R, 0.5),), PAIRS)
    found = sparse_fit(weight_RC, hessian_CC, sparsity, rounds=30, steps=16)
    assert bool((found.loss_R > 0.999 * best_R).all())
    assert float(found.loss_R.sum()) < 1.5 * float(best_R.sum())
    factor_CC = upper_factor(damp(hessian_CC, 0.01))
    greedy = sparse_sweep(weight_RC, factor_CC, sparsity)
    assert float(greedy.loss_R.sum()) > 2 * float(best_R.sum())


@pytest.mark.parametrize("group", [None, PAIRS])
def test_an_identity_leaves_the_greatest_magnitudes(group: NofM | None) -> None:
    weight_RC, _ = problem()
    sparsity = Sparsity((Share(R, 0.5),), group)
    magnitude_RC = weight_RC.abs()
    grouped = magnitude_RC.flatten() if group is None else magnitude_RC.view(-1, 4)
    kept = R * C // 2 if group is None else 2
    greatest = grouped.topk(kept, dim=-1).values.square().sum()
    for rounds in (0, 1, 2, 3, 8, 32):
        found = sparse_fit(weight_RC, torch.eye(C), sparsity, rounds=rounds)
        torch.testing.assert_close(found.weight_RC, weight_RC * found.kept_RC)
        assert float(found.weight_RC.square().sum()) > 0.99999 * float(greatest)


HALF = Sparsity((Share(R, 0.5),))


@pairs(rows=[R, 4 * C], mean=[0.0, 3.0, 30.0], group=[None, PAIRS])
def test_a_choice_found_in_16_bits_is_as_good(group: NofM | None, mean: float, rows: int) -> None:
    """Also where inputs are nearly the same for all tokens, so that one eigenvalue is all."""
    torch.manual_seed(0)
    mixing_CC = torch.randn(C, C) * torch.logspace(0, -1, C).unsqueeze(-1)
    inputs_TC = torch.randn(4 * C, C) @ mixing_CC
    inputs_TC += mean * inputs_TC.std(0) * torch.randn(C).sign()
    weight_RC, hessian_CC = torch.randn(rows, C), inputs_TC.T @ inputs_TC
    sparsity = Sparsity((Share(rows, 0.5),), group)
    losses = {
        dtype: float(sparse_fit(weight_RC, hessian_CC, sparsity, dtype=dtype).loss_R.double().sum())
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert losses[torch.bfloat16] < 1.01 * losses[torch.float32]
