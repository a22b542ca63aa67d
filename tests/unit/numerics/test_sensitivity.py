# SPDX-License-Identifier: Apache-2.0
"""What compensation leaves, beside the matrices written out and rounding that is drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.gram import limit_exploded_gradients, limit_long_gradients
from llmcompressor.numerics.hessian import upper_factor
from llmcompressor.numerics.sensitivity import compensated_shares

C = 24


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens with columns that depend on each other, in float64, and their covariance."""
    torch.manual_seed(0)
    mix_CC = torch.randn(C, C, dtype=torch.float64) + 8 * torch.eye(C)
    x_TC = torch.randn(tokens, C, dtype=torch.float64) @ mix_CC
    return x_TC, mix_CC.T @ mix_CC


@pytest.mark.parametrize("ordered", [False, True])
def test_it_is_what_is_felt_of_compensated_rounding(ordered: bool) -> None:
    """Errors E become D with D R = E diag(R); each token is there twice, once in each half."""
    x_TC, _ = inputs(40)
    felt_T = torch.rand(40).double()
    damped_CC = x_TC.T @ x_TC
    order_C = damped_CC.diagonal().argsort(descending=True) if ordered else torch.arange(C)
    damped_CC.diagonal().add_(0.01 * damped_CC.diagonal().mean())
    factor_CC = upper_factor(damped_CC[order_C][:, order_C])
    felt_CC = (x_TC.T * felt_T) @ x_TC
    expected_C = torch.empty(C, dtype=torch.float64)
    for place, column in enumerate(order_C.tolist()):
        error_C = torch.zeros(C, dtype=torch.float64)
        error_C[place] = factor_CC[place, place]
        change_C = torch.linalg.solve(factor_CC.T, error_C)  # D R = E diag(R), by rows
        lost = change_C @ felt_CC[order_C][:, order_C] @ change_C
        expected_C[column] = lost / felt_CC[column, column]
    found_KC = compensated_shares(
        x_TC.float().repeat_interleave(2, dim=0),
        torch.stack([felt_T, torch.ones(40)]).float().repeat_interleave(2, dim=1),
        ordered=ordered,
    )
    torch.testing.assert_close(found_KC[0].double(), expected_C, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found_KC[0], found_KC[1], rtol=0.1)


def test_few_tokens_do_not_flatter() -> None:
    """With three tokens for each column the share is, in the mean, that of the covariance."""
    x_TC, covariance_CC = inputs(3 * C)
    pivots_C = upper_factor(covariance_CC).diagonal().square()
    true_C = pivots_C / covariance_CC.diagonal()
    found_C = compensated_shares(x_TC.float(), torch.ones(1, 3 * C), ordered=False)[0].double()
    flattered_CC = x_TC[::2].T @ x_TC[::2]
    flattered_C = upper_factor(flattered_CC).diagonal().square() / flattered_CC.diagonal()
    assert (found_C / true_C).log().mean().abs() < 0.15
    assert (flattered_C / true_C).log().mean() < -0.4


def test_long_tokens_are_in_both_halves() -> None:
    """The first one of every text is a thousand times as long as others; it is hardly felt."""
    torch.manual_seed(0)
    x_TC, first_C = torch.randn(512, C), torch.randn(C)
    x_TC[::128] = 1000 * first_C + torch.randn(4, C)
    felt_T = torch.full((512,), 1e-3)
    felt_T[::128] = 1e-9
    shares_C = compensated_shares(x_TC, felt_T.unsqueeze(0), ordered=True)[0]
    assert float(shares_C.max()) < 2


def test_columns_of_zeros_count_whole() -> None:
    x_TC, _ = inputs(60)
    x_TC[:, 3] = 0
    shares_C = compensated_shares(x_TC.float(), torch.ones(1, 60), ordered=True)[0]
    assert shares_C[3] == 1
    assert bool(torch.isfinite(shares_C).all())
    none_C = compensated_shares(torch.zeros(4, C), torch.ones(1, 4), ordered=True)[0]
    assert torch.equal(none_C, torch.ones(C))


@pytest.mark.parametrize(
    ("limit", "below", "counted"),
    [(limit_exploded_gradients, 50, 1), (limit_long_gradients, 5, 10)],
)
def test_long_gradients_are_shortened(limit, below: int, counted: int) -> None:
    """One token of a text that begins in an unstable way is felt a thousand times as much."""
    torch.manual_seed(0)
    gradient_TR = torch.randn(512, 16).bfloat16()
    assert limit(gradient_TR) is gradient_TR
    length_T = gradient_TR.float().norm(dim=1)
    for factor, is_limited in ((below, False), (1000, True)):
        own_TR = gradient_TR.clone()
        own_TR[3] *= factor
        found_TR = limit(own_TR.view(4, 128, 16)).view(512, 16)
        assert found_TR.dtype == torch.bfloat16
        others = torch.arange(512) != 3
        assert torch.equal(found_TR[others], own_TR[others])
        found, median = found_TR[3].float(), length_T.median()
        if is_limited:
            torch.testing.assert_close(found.norm(), counted * median, rtol=0.02, atol=0.0)
            along = torch.cosine_similarity(found, gradient_TR[3].float(), dim=0)
            assert along > 0.999, "its direction stays"
        else:
            assert torch.equal(found, own_TR[3].float())
    none_TR = torch.zeros(4, 3)
    assert limit(none_TR) is none_TR
