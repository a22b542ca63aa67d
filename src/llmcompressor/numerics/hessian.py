# SPDX-License-Identifier: Apache-2.0
r"""Factorization of a damped Hessian for the column sweep.

The sweep of GPTQ (arXiv:2210.17323, Alg. 1) and of SparseGPT (arXiv:2301.00774) uses a factor of
the inverse Hessian, which takes a factorization, an inversion and another factorization. The same
decisions follow from one factorization of the Hessian itself (LDLQ, arXiv:2307.13304, Theorem 6):
it needs the upper triangular R with

.. math:: R R^\top = H + \lambda I, \qquad
      \lambda = \text{dampening} \cdot \operatorname{mean}(\operatorname{diag} H).

With J the reversal of the order, ``J H J = L Lᵀ`` gives ``R = J L J``. The papers' factor of the
inverse is its inverse, so that their ``1 / U_cc`` is ``R_cc``.

H is symmetric, float32 or float64 ``[..., C, C]``; ``dampening`` is at least 0, of each matrix
``[..., 1]``.

A *dead* column is one whose input was zero in every token. On these tokens its weights may be
anything, but later inputs may excite it. So wherever errors are weighed by the inputs, it counts as
a hundredth of the mean of the others; in the mean itself it does not count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from llmcompressor.numerics.cholesky import cholesky
from llmcompressor.runtime.threads import parallel_spans

_PIECE = 2**18
_UNSEEN = 0.01
"""What a dead column counts, as a fraction of the mean of the others: as much as dampening adds."""


class SingularHessianError(ArithmeticError):
    """The damped Hessian has no Cholesky factor: it is not positive definite, or not finite."""


class DampedFactor(NamedTuple):
    """The result of :func:`factorize_with_rising_dampening`: the factor and its dampening."""

    factor_CC: Tensor
    """Upper triangular R, float32 or float64, ``[..., C, C]``."""
    dampening: float
    """The fraction of the mean diagonal that made the factorization succeed."""


def dead_columns(hessian_CC: Tensor) -> Tensor:
    """Mask of the columns whose input was zero in every token: bool ``[..., C]``."""
    return hessian_CC.diagonal(dim1=-2, dim2=-1) == 0


def fill_dead_columns(mean_square_C: Tensor) -> Tensor:
    """Sums or means of squares, float ``[..., C]``, with what dead columns count in their place.

    >>> fill_dead_columns(torch.tensor([2.0, 0.0, 4.0]))
    tensor([2.0000, 0.0300, 4.0000])
    """
    return mean_square_C.where(mean_square_C != 0, _UNSEEN * _live_mean(mean_square_C))


def fill_dead_diagonal(hessian_CC: Tensor) -> Tensor:
    """The same for the diagonal of H; H itself if no column is dead."""
    return damp(hessian_CC, 0.0) if bool(dead_columns(hessian_CC).any()) else hessian_CC


def damp(hessian_CC: Tensor, dampening: float | Tensor) -> Tensor:
    """``H + λI`` as a new tensor."""
    damped_CC = hessian_CC.clone()
    damped_CC.diagonal(dim1=-2, dim2=-1).copy_(_damped_diagonal(hessian_CC, dampening))
    return damped_CC


def ridge(hessian_CC: Tensor, dampening: float | Tensor) -> Tensor:
    """λ, ``[..., 1]``."""
    return dampening * _live_mean(hessian_CC.diagonal(dim1=-2, dim2=-1))


def _damped_diagonal(hessian_CC: Tensor, dampening: float | Tensor) -> Tensor:
    diagonal_C = hessian_CC.diagonal(dim1=-2, dim2=-1)
    added_1 = ridge(hessian_CC, dampening)
    unseen_1 = added_1.clamp(min=_UNSEEN * _live_mean(diagonal_C))
    return (diagonal_C + added_1).where(diagonal_C != 0, unseen_1)


def _live_mean(diagonal_C: Tensor) -> Tensor:
    """Mean over the columns that are not dead, ``[..., 1]``; 1 if all are."""
    live_1 = (diagonal_C != 0).sum(dim=-1, keepdim=True)
    mean_1 = diagonal_C.mean(dim=-1, keepdim=True) * (diagonal_C.shape[-1] / live_1.clamp(min=1))
    return mean_1.where(live_1 > 0, 1)


def upper_factor(damped_CC: Tensor) -> Tensor:
    """The upper triangular R with ``R Rᵀ = H``, H positive definite.

    Raises:
        SingularHessianError: if H has no such factor.

    >>> import torch
    >>> H = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> R = upper_factor(H)
    >>> torch.allclose(R @ R.T, H), float(R[1, 0])
    (True, 0.0)
    """
    return _factor_of_reversed(damped_CC.flip(-2, -1))


def _factor_of_reversed(reversed_CC: Tensor) -> Tensor:
    """R from J H J, which is overwritten: these matrices can be the largest of a run."""
    lower_CC = cholesky(reversed_CC, overwrite=True)
    if lower_CC is None:
        raise SingularHessianError(
            "The damped Hessian is not positive definite; more dampening is needed."
        )
    C = lower_CC.shape[-1]
    return _reverse_(lower_CC.view(*lower_CC.shape[:-2], C * C)).view(lower_CC.shape)


def _reverse_(values_N: Tensor) -> Tensor:
    """Reverse the last dimension in place, since a copy would be as large as a Hessian."""
    N = values_N.shape[-1]
    for lo in range(0, N // 2, _PIECE):
        hi = min(lo + _PIECE, N // 2)
        front_K, back_K = values_N[..., lo:hi], values_N[..., N - hi : N - lo]
        kept_K = front_K.flip(-1)
        front_K.copy_(back_K.flip(-1))
        back_K.copy_(kept_K)
    return values_N


def factorize_with_rising_dampening(
    hessian_CC: Tensor, dampening: float, *, order_C: Tensor | None = None, steps: int = 4
) -> DampedFactor:
    """Factorize with ``dampening``, then with 10, 100, … times as much until it succeeds.

    ``order_C``, int64 ``[..., C]``, is the order of rows and columns in the factor; H is not
    changed. A dampening of 0 is raised to 0.001 at the second of ``steps``.

    Raises:
        SingularHessianError: if all of them fail.
    """
    fraction = dampening
    for step in range(steps):
        try:
            reversed_CC = _reversed(hessian_CC, order_C, fraction)
            return DampedFactor(_factor_of_reversed(reversed_CC), fraction)
        except SingularHessianError:
            if step == steps - 1:
                raise
        fraction = max(fraction * 10, 1e-3)
    raise AssertionError("unreachable: the last step returns or raises")


def _permuted(hessian_CC: Tensor, order_C: Tensor) -> Tensor:
    """Rows and columns in another order as a new tensor, computed by parts of the rows."""
    permuted_CC = torch.empty_like(hessian_CC)

    def permute(rows: slice) -> None:
        part_S = order_C[..., rows]
        if hessian_CC.ndim == 2:
            permuted_CC[rows] = hessian_CC.index_select(0, part_S).index_select(1, order_C)
            return
        wide_SC = part_S.unsqueeze(-1).expand(*part_S.shape, hessian_CC.shape[-1])
        part_SC = hessian_CC.gather(-2, wide_SC)
        permuted_CC[..., rows, :] = part_SC.gather(-1, order_C.unsqueeze(-2).expand_as(part_SC))

    parallel_spans(permute, hessian_CC.shape[-2], hessian_CC.device)
    return permuted_CC


def _reversed(hessian_CC: Tensor, order_C: Tensor | None, dampening: float) -> Tensor:
    """J H J with dampening, after a permutation of H by ``order_C``; a new tensor."""
    diagonal_C = _damped_diagonal(hessian_CC, dampening)
    if order_C is None:
        reversed_CC = hessian_CC.flip(-2, -1)
        diagonal_C = diagonal_C.flip(-1)
    else:
        backwards_C = order_C.flip(-1)
        reversed_CC = _permuted(hessian_CC, backwards_C)
        diagonal_C = diagonal_C.gather(-1, backwards_C)
    reversed_CC.diagonal(dim1=-2, dim2=-1).copy_(diagonal_C)
    return reversed_CC
