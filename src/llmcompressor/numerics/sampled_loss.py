# SPDX-License-Identifier: Apache-2.0
r"""The cross entropy of tokens whose labels are drawn from what a model predicts.

The mean of the outer product of its gradient is the Fisher matrix (arXiv:1412.1193, section 5). Of
the probabilities p of a token and a number u, uniform in [0, 1), the label is the first one whose
sum :math:`p_1 + \dots + p_v` is above u. T tokens, V labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TOKENS = 512
"""Tokens whose logits are in float32 at once."""


def sampled_loss(logits_TV: Tensor, draw_T: Tensor) -> Tensor:
    """The sum of the tokens' cross entropies in nats, float32, which has a gradient.

    Args:
        logits_TV: predictions, floating dtype. Their gradient has the same dtype.
        draw_T: numbers in [0, 1), float32, one for each token.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]], requires_grad=True)
    >>> sampled_loss(logits, torch.tensor([0.4, 0.6])).backward()
    >>> logits.grad
    tensor([[-0.5000,  0.5000],
            [ 0.5000, -0.5000]])
    """
    total: Tensor = _SampledLoss.apply(logits_TV, draw_T)  # type: ignore[no-untyped-call]
    return total


class _SampledLoss(torch.autograd.Function):
    """Computes the gradient, p less the label's 1, on the way forward: one softmax for both."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, draw_T: Tensor) -> Tensor:
        gradient_TV = torch.empty_like(logits_TV)
        total = torch.zeros((), dtype=torch.float32, device=logits_TV.device)
        pieces = (torch.split(one, _TOKENS) for one in (logits_TV, gradient_TV, draw_T))
        for given_TV, wanted_TV, each_T in zip(*pieces, strict=True):
            chance_TV = given_TV.float().softmax(dim=-1)
            sum_TV = chance_TV.cumsum(dim=-1)
            # a sum is 1 within rounding: no label beyond the last one that has a chance
            below_T1 = each_T.unsqueeze(-1) * sum_TV[:, -1:]
            below_T1 = below_T1.minimum(sum_TV[:, -1:].nextafter(torch.zeros_like(below_T1)))
            label_T1 = torch.searchsorted(sum_TV, below_T1, right=True)
            label_T1.clamp_(max=chance_TV.shape[-1] - 1)  # of what is not finite
            total -= chance_TV.gather(-1, label_T1).log().sum()
            chance_TV.scatter_add_(-1, label_T1, chance_TV.new_full(label_T1.shape, -1.0))
            wanted_TV.copy_(chance_TV)
        ctx.save_for_backward(gradient_TV)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (gradient_TV,) = ctx.saved_tensors
        return gradient_TV * gradient.to(gradient_TV.dtype), None
