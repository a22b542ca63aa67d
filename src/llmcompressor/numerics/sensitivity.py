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

from collections.abc import Callable

import torch
from torch import Tensor

from llmcompressor.numerics.hessian import (
    SingularHessianError,
    factorize_with_rising_dampening,
)
from llmcompressor.runtime.threads import parallel_for

_DAMPENING = 0.01
_SQUARED_TOKENS = 256
"""Tokens that are squared at once: few enough for a processor's cache."""


def add_squares(sums_R: Tensor, gradient_TR: Tensor) -> Tensor:
    """Add the sum of squares of each column to ``sums_R``, and return that of each token.

    Args:
        sums_R: float32, in place.
        gradient_TR: floating dtype.

    Returns:
        The squares of each token, float32 ``[T]``.

    >>> sums = torch.zeros(2)
    >>> add_squares(sums, torch.tensor([[1.0, 2.0], [3.0, -1.0]])), sums
    (tensor([ 5., 10.]), tensor([10.,  5.]))
    """
    pieces = torch.split(gradient_TR, _SQUARED_TOKENS)
    by_piece_NR = sums_R.new_empty(len(pieces), len(sums_R))
    by_token_T = sums_R.new_empty(len(gradient_TR))
    tokens = torch.split(by_token_T, _SQUARED_TOKENS)

    def add_up(number: int) -> None:
        wide_TR = pieces[number].to(torch.float32, copy=True)
        wide_TR.mul_(wide_TR)
        torch.sum(wide_TR, dim=0, out=by_piece_NR[number])
        torch.sum(wide_TR, dim=1, out=tokens[number])

    _for_each(add_up, len(pieces), gradient_TR.device)
    for sum_R in by_piece_NR:
        sums_R += sum_R
    return by_token_T


def weighted_squares(input_TC: Tensor, weight_KT: Tensor) -> Tensor:
    """The sum of squares of each column, for each of K weightings of the tokens.

    Args:
        input_TC: floating dtype.
        weight_KT: float32.

    Returns:
        float32 ``[K, C]``.

    >>> weighted_squares(torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[1.0, 0.5]]))
    tensor([[5.5000, 4.5000]])
    """
    pieces = torch.split(input_TC, _SQUARED_TOKENS)
    weights = torch.split(weight_KT, _SQUARED_TOKENS, dim=1)
    sums_NKC = weight_KT.new_empty(len(pieces), len(weight_KT), input_TC.shape[1])

    def add_up(number: int) -> None:
        wide_TC = pieces[number].to(torch.float32, copy=True)
        wide_TC.mul_(wide_TC)
        torch.mm(weights[number], wide_TC, out=sums_NKC[number])

    _for_each(add_up, len(pieces), input_TC.device)
    return sums_NKC.sum(dim=0)


def _for_each(work: Callable[[int], None], count: int, device: torch.device) -> None:
    if device.type == "cpu":
        parallel_for(work, range(count))
    else:
        for number in range(count):
            work(number)


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


def compensated_shares(gram_CC: Tensor, *, ordered: bool) -> Tensor:
    """What a column sweep leaves of each column's mean square, as a share of it: float32 ``[C]``.

    Args:
        gram_CC: sum or mean of ``x xᵀ``, float32, symmetric.
        ordered: as for :func:`compensated_columns`.

    Returns:
        The shares; 1 of a column of zeros.

    >>> [round(float(one), 2) for one in compensated_shares(2 * torch.ones(2, 2), ordered=False)]
    [0.02, 1.01]
    """
    diagonal_C = gram_CC.diagonal()
    shares_C = compensated_columns(gram_CC, ordered=ordered) / diagonal_C
    return shares_C.where(diagonal_C > 0, 1.0)
