# SPDX-License-Identifier: Apache-2.0
r"""Asymmetric calibration: weights that correct the error of the compressed model's inputs.

In the original model a Linear gets inputs X; in the compressed one, whose earlier layers are
already rounded, it gets Y. Its target output is still W X. Minimizing

.. math:: \lVert Y Q^\top - X W^\top \rVert_F^2  \qquad (\text{rows of } X, Y \text{ are tokens})

over real-valued Q, with a ridge towards W, gives the weight to round instead of W:

.. math:: W^* = W + W \left[ (G + \lambda I)^{-1} C \right]^\top,
      \qquad G = Y^\top Y,\; C = Y^\top (X - Y),\;
      \lambda = \text{ridge} \cdot \operatorname{mean}(\operatorname{diag} G).

The ordinary sweep of W* on G then does the rest. Compare GPTAQ (arXiv:2504.02692, Eq. 9) and
Qronos (arXiv:2505.11695); the difference X − Y is accumulated, and not YᵀX, because it is small
and YᵀX − YᵀY would cancel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor

from llmcompressor.numerics.cholesky import FactoredSolver, cholesky
from llmcompressor.numerics.hessian import SingularHessianError, damp
from llmcompressor.numerics.products import spread_matmul

__all__ = [
    "corrected_weight",
    "corrected_weight_with_raise",
    "refitted_weight_with_raise",
    "ridge_for",
]


def ridge_for(ridge: float, gram_CC: Tensor, tokens: Sequence[int]) -> float | Tensor:
    """The ridge for a number of tokens: at least C / T.

    (G + λI)⁻¹C is a regression on C inputs from T tokens. With few tokens it fits their noise, and
    its variance grows with C / T.

    Args:
        ridge: the requested ridge, as a fraction of the mean diagonal.
        gram_CC: ``[C, C]``, or ``[B, C, C]`` with B numbers of tokens.
        tokens: tokens of each Gram matrix, at least 1.

    >>> import torch
    >>> ridge_for(0.05, torch.eye(4), [40]), ridge_for(0.05, torch.eye(4), [4000])
    (0.1, 0.05)
    """
    each = [max(ridge, gram_CC.shape[-1] / number) for number in tokens]
    return each[0] if gram_CC.ndim == 2 else gram_CC.new_tensor(each).unsqueeze(-1)


def corrected_weight(
    weight_RC: Tensor, gram_CC: Tensor, cross_CC: Tensor, ridge: float | Tensor
) -> Tensor:
    """The weight W* whose outputs on Y approximate those of W on X.

    Args:
        weight_RC: W, float32 ``[..., R, C]``.
        gram_CC: ``G = YᵀY``, float32 ``[..., C, C]``.
        cross_CC: ``C = Yᵀ(X − Y)``, float32 ``[..., C, C]``; rows belong to Y.
        ridge: λ as a fraction of the mean of the diagonal of G, more than 0; of each matrix
            ``[..., 1]``.

    Raises:
        SingularHessianError: if ``G + λI`` is not positive definite.

    With X = Y there is no correction:

    >>> import torch
    >>> W, Y = torch.ones(1, 2), torch.eye(2)
    >>> corrected_weight(W, Y.T @ Y, Y.T @ (Y - Y), 0.01)
    tensor([[1., 1.]])
    """
    lower_CC = _factored(gram_CC, ridge)
    # R right-hand sides instead of C: (G + λ)⁻¹ C Wᵀ, the product first.
    change_CR = spread_matmul(cross_CC, weight_RC.mT)
    return weight_RC + FactoredSolver(lower_CC).solve_(change_CR).mT


def _factored(gram_CC: Tensor, ridge: float | Tensor) -> Tensor:
    lower_CC = cholesky(damp(gram_CC, ridge), overwrite=True)
    if lower_CC is None:
        raise SingularHessianError("The Gram matrix with its ridge is not positive definite.")
    return lower_CC


def corrected_weight_with_raise(
    weight_RC: Tensor, gram_CC: Tensor, cross_CC: Tensor, ridge: float | Tensor, *, steps: int = 4
) -> Tensor:
    """The same as :func:`corrected_weight`, with 10, 100, … times the ridge if it is too small.

    Args:
        weight_RC: W, float32 ``[..., R, C]``.
        gram_CC: G, float32 ``[..., C, C]``.
        cross_CC: C, float32 ``[..., C, C]``.
        ridge: the first value.
        steps: number of values to try.

    Raises:
        SingularHessianError: if all of them fail.
    """
    for step in range(steps - 1):
        with contextlib.suppress(SingularHessianError):
            return corrected_weight(weight_RC, gram_CC, cross_CC, ridge * 10**step)
    return corrected_weight(weight_RC, gram_CC, cross_CC, ridge * 10 ** (steps - 1))


def refitted_weight_with_raise(
    weight_RC: Tensor,
    gram_CC: Tensor,
    missing_CR: Tensor,
    ridge: float | Tensor,
    *,
    steps: int = 4,
) -> Tensor:
    """The weight that also compensates for a residual E of the sum to which its output is added.

    With E the residual of each token: ``W + [(G + λI)⁻¹ Yᵀ E]ᵀ``, the minimum of
    ``‖Y (Q − W)ᵀ − E‖²`` with a ridge towards W.

    Args:
        weight_RC: W, float32 ``[..., R, C]``.
        gram_CC: ``G = YᵀY``, float32 ``[..., C, C]``.
        missing_CR: ``YᵀE``, float32 ``[..., C, R]``; not changed.
        ridge: λ as a fraction of the mean diagonal, more than 0; the first value.
        steps: number of values to try, each ten times the one before.

    Raises:
        SingularHessianError: if all of them fail.

    >>> import torch
    >>> W, Y, E = torch.zeros(1, 2), torch.eye(2), torch.tensor([[3.0], [6.0]])
    >>> refitted_weight_with_raise(W, Y.T @ Y, Y.T @ E, 0.5).round(decimals=4)
    tensor([[2., 4.]])
    """
    for step in range(steps):
        with contextlib.suppress(SingularHessianError):
            lower_CC = _factored(gram_CC, ridge * 10**step)
            return weight_RC + FactoredSolver(lower_CC).solve_(missing_CR.clone()).mT
    raise SingularHessianError("The Gram matrix with its ridge is not positive definite.")
