# SPDX-License-Identifier: Apache-2.0
"""The corrected weight is a ridge regression from the compressed stream to the original outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.gptq import (
    corrected_weight,
    corrected_weight_with_retries,
    residual_corrected_weight,
    ridge_for_tokens,
)
from llmcompressor.numerics.hessian import SingularHessianError

R, C, T = 12, 20, 300


def problem(seed: int = 0, noise: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    """W, the original inputs X and the compressed stream's inputs Y."""
    torch.manual_seed(seed)
    W_RC = torch.randn(R, C, dtype=torch.float64)
    X_TC = torch.randn(T, C, dtype=torch.float64) @ torch.randn(C, C, dtype=torch.float64)
    return W_RC, X_TC, X_TC + noise * torch.randn(T, C, dtype=torch.float64) * X_TC.std()


def corrected(W_RC: Tensor, X_TC: Tensor, Y_TC: Tensor, ridge: float) -> Tensor:
    return corrected_weight(W_RC, Y_TC.T @ Y_TC, Y_TC.T @ (X_TC - Y_TC), ridge)


def error(Q_RC: Tensor, W_RC: Tensor, X_TC: Tensor, Y_TC: Tensor) -> float:
    return float((Y_TC @ Q_RC.T - X_TC @ W_RC.T).square().sum())


@pytest.mark.parametrize("ridge", [1e-3, 0.03, 1.0])
def test_it_is_ridge_regression_towards_the_weight(ridge: float) -> None:
    W_RC, X_TC, Y_TC = problem()
    penalty = (ridge * (Y_TC.T @ Y_TC).diagonal().mean()).sqrt()
    # min ||Y Q^T - X W^T||^2 + penalty^2 ||Q - W||^2, as one least-squares problem
    stacked = torch.cat([Y_TC, penalty * torch.eye(C, dtype=torch.float64)])
    wanted = torch.cat([X_TC @ W_RC.T, penalty * W_RC.T])
    expected_RC = torch.linalg.lstsq(stacked, wanted).solution.T
    assert torch.allclose(corrected(W_RC, X_TC, Y_TC, ridge), expected_RC, atol=1e-9)


def test_equal_streams_leave_the_weight_as_it_is() -> None:
    W_RC, X_TC, _ = problem()
    assert torch.equal(corrected(W_RC, X_TC, X_TC, 0.03), W_RC)


def test_the_output_comes_closer_to_the_original_one() -> None:
    W_RC, X_TC, Y_TC = problem()
    before = error(W_RC, W_RC, X_TC, Y_TC)
    after = error(corrected(W_RC, X_TC, Y_TC, 1e-3), W_RC, X_TC, Y_TC)
    assert after < 0.9 * before
    stronger = error(corrected(W_RC, X_TC, Y_TC, 0.1), W_RC, X_TC, Y_TC)
    assert after < stronger < before


def test_batches_are_solved_as_if_alone_and_nothing_is_changed() -> None:
    given = [problem(seed) for seed in range(3)]
    W = torch.stack([one[0] for one in given])
    G = torch.stack([Y.T @ Y for _, _, Y in given])
    cross = torch.stack([Y.T @ (X - Y) for _, X, Y in given])
    before = [tensor.clone() for tensor in (W, G, cross)]
    together = corrected_weight(W, G, cross, 0.03)
    for tensor, old in zip((W, G, cross), before, strict=True):
        assert torch.equal(tensor, old)
    for one, result in zip(given, together, strict=True):
        assert torch.allclose(corrected(*one, 0.03), result, atol=1e-10)


def test_an_indefinite_matrix_is_an_error() -> None:
    W_RC, X_TC, Y_TC = problem()
    G_CC = Y_TC.T @ Y_TC
    with pytest.raises(SingularHessianError, match="positive definite"):
        corrected_weight(W_RC, -G_CC, Y_TC.T @ (X_TC - Y_TC), 0.03)


@pytest.mark.parametrize("seed", range(5))
def test_with_few_tokens_more_ridge_is_better_on_others(seed: int) -> None:
    W_RC, X_TC, Y_TC = problem(seed, noise=0.5)
    tokens = 30
    x_TC, y_TC = X_TC[:tokens], Y_TC[:tokens]
    gram_CC, cross_CC = y_TC.T @ y_TC, y_TC.T @ (x_TC - y_TC)

    def error(ridge: float | Tensor) -> float:
        found_RC = corrected_weight(W_RC, gram_CC, cross_CC, ridge)
        change_TR = Y_TC[tokens:] @ found_RC.T - X_TC[tokens:] @ W_RC.T
        return float(change_TR.square().mean())

    assert error(ridge_for_tokens(0.05, gram_CC, [tokens])) < error(0.05)


@pytest.mark.parametrize("ridge", [1e-3, 0.03, 1.0])
def test_what_a_sum_lacks_is_regressed_on_the_inputs(ridge: float) -> None:
    """min ||Y (Q - W)^T - E||^2 + penalty^2 ||Q - W||^2, as one least-squares problem."""
    W_RC, _, Y_TC = problem()
    E_TR = torch.randn(T, R, dtype=torch.float64)
    penalty = (ridge * (Y_TC.T @ Y_TC).diagonal().mean()).sqrt()
    stacked = torch.cat([Y_TC, penalty * torch.eye(C, dtype=torch.float64)])
    wanted = torch.cat([E_TR, torch.zeros(C, R, dtype=torch.float64)])
    expected_RC = W_RC + torch.linalg.lstsq(stacked, wanted).solution.T
    missing_CR = Y_TC.T @ E_TR
    before_CR = missing_CR.clone()
    found_RC = residual_corrected_weight(W_RC, Y_TC.T @ Y_TC, missing_CR, ridge)
    assert torch.allclose(found_RC, expected_RC, atol=1e-9)
    assert torch.equal(missing_CR, before_CR)


def test_a_ridge_that_is_too_small_is_raised_tenfold() -> None:
    """The least eigenvalue is -0.5, the mean of the diagonal 1: a ridge of 0.1 does not do."""
    W_RC, X_TC, Y_TC = problem()
    direction_C = torch.ones(C, dtype=torch.float64) / C**0.5
    G_CC = torch.eye(C, dtype=torch.float64) - 1.5 * torch.outer(direction_C, direction_C)
    G_CC += torch.diag(1 - G_CC.diagonal())
    cross_CC = Y_TC.T @ (X_TC - Y_TC)
    missing_CR = cross_CC @ W_RC.T
    least = float(torch.linalg.eigvalsh(G_CC).min())
    assert -1 < least < -0.1
    expected_RC = corrected_weight(W_RC, G_CC, cross_CC, 1.0)
    for raised in (
        corrected_weight_with_retries(W_RC, G_CC, cross_CC, 0.01),
        residual_corrected_weight(W_RC, G_CC, missing_CR, 0.01),
    ):
        assert torch.allclose(raised, expected_RC, atol=1e-9)
    for too_few in (
        lambda: corrected_weight_with_retries(W_RC, G_CC, cross_CC, 0.01, steps=2),
        lambda: residual_corrected_weight(W_RC, G_CC, missing_CR, 0.01, steps=2),
    ):
        with pytest.raises(SingularHessianError, match="positive definite"):
            too_few()
