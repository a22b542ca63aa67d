# SPDX-License-Identifier: Apache-2.0
"""The optimal value of each weight, given the codes of all others."""

from __future__ import annotations

from torch import Tensor

from llmcompressor.numerics.hessian import ridge
from llmcompressor.numerics.products import OFTEN_ALIKE, matmul

__all__ = ["settled_weight"]


def settled_weight(
    weight_RC: Tensor, rounded_RC: Tensor, hessian_CC: Tensor, *, dampening: float = 0.0
) -> Tensor:
    r"""The minimum of ``tr(D H Dᵀ)``, D = Q − W, over each single weight.

    .. math:: \tilde w_c = q_c - (D H)_c / H_{cc}

    Once coordinate descent (:func:`llmcompressor.numerics.gptq.descend`) has converged, each of
    them rounds to its own code; its distance from the middle between two codes determines the cost
    of the other code.

    Args:
        weight_RC: W, float32 ``[..., R, C]``.
        rounded_RC: Q, float32 ``[..., R, C]``.
        hessian_CC: H, float32 ``[..., C, C]``.
        dampening: added to the diagonal of H, as a fraction of its mean, more than 0 if columns
            are dead.

    With a diagonal H it is the weight itself:

    >>> import torch
    >>> W, Q = torch.tensor([[0.4, 0.9]]), torch.tensor([[0.0, 1.0]])
    >>> settled_weight(W, Q, torch.eye(2))
    tensor([[0.4000, 0.9000]])
    """
    change_RC = rounded_RC - weight_RC
    added_1 = ridge(hessian_CC, dampening).unsqueeze(-1)
    slope_RC = matmul(change_RC, hessian_CC, fewest=OFTEN_ALIKE).addcmul_(change_RC, added_1)
    curvature_C = hessian_CC.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) + added_1
    return rounded_RC - slope_RC / curvature_C
