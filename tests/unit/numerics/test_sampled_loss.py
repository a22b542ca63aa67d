# SPDX-License-Identifier: Apache-2.0
"""Labels are drawn as often as the model predicts them, and the loss is their cross entropy."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from llmcompressor.numerics.sampled_loss import sampled_loss


def labels(logits_TV: torch.Tensor, draw_T: torch.Tensor) -> torch.Tensor:
    """The gradient is negative at the label alone."""
    given = logits_TV.detach().clone().requires_grad_()
    sampled_loss(given, draw_T).backward()
    assert given.grad is not None
    return given.grad.argmin(dim=-1)


def test_a_label_is_drawn_as_often_as_it_is_predicted() -> None:
    chance_V = torch.tensor([0.5, 0.0, 0.125, 0.375])
    draw_T = (torch.arange(800) + 0.5) / 800
    found = labels(chance_V.log().expand(800, 4), draw_T).bincount(minlength=4)
    assert found.tolist() == [400, 0, 100, 300]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_and_its_gradient_are_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits_TV = (torch.randn(1100, 37) * 3).to(dtype).requires_grad_()
    draw_T = torch.rand(1100)
    found = sampled_loss(logits_TV, draw_T)
    (own,) = torch.autograd.grad(found, logits_TV)
    expected = cross_entropy(logits_TV.float(), labels(logits_TV, draw_T), reduction="sum")
    (plain,) = torch.autograd.grad(expected, logits_TV)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(
        own, plain, rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=2e-6
    )


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-24])
def test_the_ends_of_the_draws_have_labels_that_can_be(draw: float) -> None:
    logits_TV = torch.full((3, 1000), -torch.inf)
    logits_TV[:, 200:700] = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    found = labels(logits_TV, torch.full((3,), draw))
    assert found.min() >= 200
    assert found.max() < 700
    assert torch.isfinite(sampled_loss(logits_TV, torch.full((3,), draw)))


def test_a_loss_that_is_no_number_stays_none() -> None:
    logits_TV = torch.full((2, 5), torch.nan)
    assert torch.isnan(sampled_loss(logits_TV, torch.rand(2)))
