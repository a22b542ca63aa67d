# SPDX-License-Identifier: Apache-2.0
r"""Rise of a model's loss when a weight is rounded, from second moments and gradients.

With y = W x and L the loss of a token, ΔW changes the mean loss by, to second order,

.. math:: \tfrac12\, \mathbb E\big[(\delta^\top \Delta W x)^2\big], \qquad
      \delta = \partial L / \partial y,

if the token is drawn from what the model itself predicts: then the Fisher matrix, the mean of the
outer product of the gradient, is the Hessian of the KL divergence from the model (arXiv:1412.1193,
section 9). Of the products of rows and of columns the diagonals are kept, as errors of rounding
have no common sign: the diagonal Fisher criterion of SqueezeLLM (arXiv:2306.07629, equation 4). It
has a number for each weight. Here it is replaced by a factor for each row and one for each column,
in which every token counts as much as the loss feels it,

.. math:: \tfrac12 \sum_r g_r \sum_c \Delta W_{rc}^2\, h_c, \qquad
      g_r = \mathbb E[\delta_r^2],\quad
      h_c = \frac{\mathbb E\big[\lVert\delta\rVert^2 x_c^2\big]}{\mathbb E \lVert\delta\rVert^2} .

It is exact for one row. K-FAC (arXiv:1503.05671, equation 16) takes δ and x for independent, which
they are not: tokens whose inputs are a hundred times as large as others (massive activations,
arXiv:2402.17762) are hardly felt.

A solver that makes later columns compensate for the error of a column, as GPTQ does, leaves of the
mean square of a column what later columns cannot: the pivot :math:`R_{cc}^2` of the factor of the
Hessian in the order of the sweep (LDLQ, arXiv:2307.13304, Theorem 1;
:mod:`llmcompressor.numerics.hessian`). h_c is multiplied by the share that is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.numerics.hessian import (
    SingularHessianError,
    factorize_with_rising_dampening,
)

_DAMPENING = 0.01


def loss_rise(error_RC: Tensor, gradient_R: Tensor, column_C: Tensor) -> float:
    """The expected rise of the loss, of tokens together if ``gradient_R`` is their sum.

    Args:
        error_RC: ΔW, floating dtype.
        gradient_R: g, float32 ``[R]``.
        column_C: h, times the share that compensation leaves of it, float32 ``[C]``.

    >>> ones = torch.ones(2)
    >>> loss_rise(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), ones, ones)
    2.5
    """
    by_row_R = error_RC.float().square() @ column_C
    return 0.5 * float(gradient_R.double() @ by_row_R.double())


def compensated_columns(gram_CC: Tensor, *, ordered: bool) -> Tensor:
    """What a column sweep leaves of each column's mean square: float32 ``[C]``.

    Args:
        gram_CC: mean of ``x xᵀ``, float32, symmetric.
        ordered: columns are swept by decreasing mean square; otherwise from left to right.

    Returns:
        The pivots; the diagonal itself where there is no factor.

    >>> compensated_columns(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), ordered=True)
    tensor([1.0100, 1.0100])
    >>> [round(float(one), 2) for one in compensated_columns(torch.ones(2, 2), ordered=False)]
    [0.02, 1.01]
    """
    diagonal_C = gram_CC.diagonal().clone()
    order_C = diagonal_C.argsort(descending=True, stable=True) if ordered else None
    try:
        factor_CC = factorize_with_rising_dampening(gram_CC, _DAMPENING, order_C=order_C).factor_CC
    except SingularHessianError:
        return diagonal_C
    pivots_C = factor_CC.diagonal().square()
    if order_C is None:
        return pivots_C
    return torch.empty_like(pivots_C).index_copy_(0, order_C, pivots_C)
