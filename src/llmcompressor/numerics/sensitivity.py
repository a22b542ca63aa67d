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

A solver that makes later columns compensate for the error of a column, as GPTQ does, rounds E in
``D R = E diag(R)``, with D the change of the weight and R the upper factor of the Hessian in the
order of the sweep (LDLQ, arXiv:2307.13304, Theorem 1; :mod:`llmcompressor.numerics.hessian`). What
the loss feels of D is then

.. math:: \tfrac12 \sum_r g_r \sum_c E_{rc}^2\, R_{cc}^2\,
          \big(R^{-1} F R^{-\top}\big)_{cc} , \qquad
          F = \frac{\mathbb E\big[\lVert\delta\rVert^2 x x^\top\big]}
                   {\mathbb E \lVert\delta\rVert^2} ,

so that h_c is multiplied by a share (:func:`compensated_shares`). It is the pivot's where the loss
feels all tokens alike, F = R Rᵀ, and more where a solver that counts them alike does not know what
the loss feels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmcompressor.numerics.gram import (
    add_upper_product,
    limit_massive_tokens,
    massive_tokens,
    mirror_upper_,
)
from llmcompressor.numerics.hessian import (
    SingularHessianError,
    factorize_with_rising_dampening,
)
from llmcompressor.runtime.threads import parallel_for

_DAMPENING = 0.01
_SQUARED_TOKENS = 256
"""Tokens that are squared at once: few enough for a processor's cache."""
_MOST = 10.0
"""Share of a column's error that a sweep can leave at most, where it errs in what is felt."""
_SOLVED_TOKENS = 1024
"""Tokens that are solved for at once: what is wide then is no larger than a Hessian."""


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


def compensated_shares(input_TC: Tensor, felt_KT: Tensor, *, ordered: bool) -> Tensor:
    """What a column sweep leaves of what the loss feels of each column's error, as a share.

    The factor is that of every second token, and of every second massive one. On these the share is
    too small, as T tokens hardly tell more than T columns apart, and on the others it is too large
    by as much: a column that depends on k others leaves 1 - k / T and 1 / (1 - k / T) of the true
    share. The geometric mean is returned.

    Args:
        input_TC: inputs x, floating dtype.
        felt_KT: squares of their gradients through each of K Linears, float32.
        ordered: columns are swept by decreasing mean square; otherwise from left to right.

    Returns:
        float32 ``[K, C]``, at most 10; 1 of a column of zeros, of a single token or without a
        factor.

    >>> x = torch.tensor([[3.0, 3.0], [2.0, 2.0], [1.0, 1.0]])
    >>> shares = compensated_shares(x, torch.ones(1, 3), ordered=False)
    >>> [round(float(one), 2) for one in shares[0]]
    [0.0, 1.0]
    """
    columns, device = input_TC.shape[1], input_TC.device
    is_massive_T = massive_tokens(input_TC)
    long_T, other_T = (own_T.nonzero().flatten() for own_T in (is_massive_T, ~is_massive_T))
    fitted_T, held_out_T = (torch.cat((long_T[half::2], other_T[half::2])) for half in range(2))
    ones_KC = torch.ones(len(felt_KT), columns, dtype=torch.float32, device=device)
    if len(held_out_T) == 0:
        return ones_KC
    gram_CC = torch.zeros(columns, columns, dtype=torch.float32, device=device)
    add_upper_product(gram_CC, limit_massive_tokens(input_TC[fitted_T])[0])
    mirror_upper_(gram_CC)
    order_C = torch.arange(columns, device=device)
    if ordered:
        order_C = gram_CC.diagonal().argsort(descending=True, stable=True)
    try:
        factor_CC = factorize_with_rising_dampening(gram_CC, _DAMPENING, order_C=order_C).factor_CC
    except SingularHessianError:
        return ones_KC
    shares = [
        _left_share(factor_CC, input_TC[own_T], felt_KT[:, own_T], order_C)
        for own_T in (fitted_T, held_out_T)
    ]
    left_KC = torch.stack(shares).log().mean(dim=0).exp().clamp(max=_MOST)
    return ones_KC.index_copy_(1, order_C, left_KC)


def _left_share(factor_CC: Tensor, input_TC: Tensor, felt_KT: Tensor, order_C: Tensor) -> Tensor:
    """``R_cc² (R⁻¹ F R⁻ᵀ)_cc / F_cc`` of tokens, in the order of the factor; 1 where F_cc is 0."""
    before_KC, after_KC = (felt_KT.new_zeros(len(felt_KT), len(factor_CC)) for _ in range(2))
    parts = zip(
        torch.split(input_TC, _SOLVED_TOKENS), torch.split(felt_KT, _SOLVED_TOKENS, 1), strict=True
    )
    for part_TC, own_KT in parts:
        wide_TC = part_TC[:, order_C].float()
        before_KC += own_KT @ wide_TC.square()
        torch.linalg.solve_triangular(factor_CC.T, wide_TC, upper=False, left=False, out=wide_TC)
        after_KC += own_KT @ wide_TC.square_()
    share_KC = after_KC * factor_CC.diagonal().square() / before_KC
    return share_KC.where((before_KC > 0) & (share_KC > 0), 1.0)
