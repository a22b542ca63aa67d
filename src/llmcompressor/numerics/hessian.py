# SPDX-License-Identifier: Apache-2.0
r"""From a Gram matrix to the factor that a column sweep needs.

The sweep of GPTQ (arXiv:2210.17323, Alg. 1) and of SparseGPT (arXiv:2301.00774) walks along the
rows of the upper triangular U with

.. math:: U^\top U = (H + \lambda I)^{-1}, \qquad
          \lambda = \text{dampening} \cdot \operatorname{mean}(\operatorname{diag} H).

The papers invert and factorize twice (Cholesky, inverse, Cholesky of the inverse). With J the
reversal of the order, one factorization and one triangular inverse do:

.. math:: J H J = L L^\top \;\Rightarrow\; H^{-1} = (J L^{-1} J)^\top (J L^{-1} J),
          \qquad U = J L^{-1} J .

All functions take leading batch dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Damped",
    "SingularHessianError",
    "damp",
    "dead_columns",
    "inverse_factor",
    "raise_dampening",
]


class SingularHessianError(ArithmeticError):
    """The damped Hessian has no Cholesky factor: it is not positive definite, or not finite."""


class Damped(NamedTuple):
    """What :func:`raise_dampening` found."""

    factor_CC: Tensor
    """Upper triangular U, float32 or float64, ``[..., C, C]``."""
    dampening: float
    """The fraction of the mean diagonal that made the factorization succeed."""


def dead_columns(hessian_CC: Tensor) -> Tensor:
    """Columns whose input was zero in every token: bool ``[..., C]``."""
    return hessian_CC.diagonal(dim1=-2, dim2=-1) == 0


def damp(hessian_CC: Tensor, dampening: float) -> Tensor:
    """``H + dampening · mean(diag H) · I`` as a new tensor; dead columns get a diagonal of 1.

    Args:
        hessian_CC: symmetric, float32 or float64, ``[..., C, C]``.
        dampening: fraction of the mean of the diagonal, at least 0.
    """
    damped_CC = hessian_CC.clone()
    diagonal_C = damped_CC.diagonal(dim1=-2, dim2=-1)
    diagonal_C[diagonal_C == 0] = 1
    diagonal_C += dampening * diagonal_C.mean(dim=-1, keepdim=True)
    return damped_CC


def inverse_factor(damped_CC: Tensor) -> Tensor:
    """The upper triangular U with ``UᵀU = H⁻¹``.

    Args:
        damped_CC: symmetric positive definite, ``[..., C, C]``.

    Raises:
        SingularHessianError: if there is no Cholesky factor.

    >>> H = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> U = inverse_factor(H)
    >>> torch.allclose(U.T @ U, torch.linalg.inv(H)), float(U[1, 0])
    (True, 0.0)
    """
    reversed_CC = damped_CC.flip(-2, -1)
    lower_CC, info = torch.linalg.cholesky_ex(reversed_CC)
    if bool((info != 0).any()) or not bool(torch.isfinite(lower_CC.sum())):
        raise SingularHessianError(
            "The damped Hessian is not positive definite; more dampening is needed."
        )
    identity_CC = torch.eye(
        lower_CC.shape[-1], dtype=lower_CC.dtype, device=lower_CC.device
    ).expand_as(lower_CC)
    inverse_CC: Tensor = torch.linalg.solve_triangular(lower_CC, identity_CC, upper=False)
    return inverse_CC.flip(-2, -1).contiguous()


def raise_dampening(hessian_CC: Tensor, dampening: float, *, steps: int = 4) -> Damped:
    """Factorize with ``dampening``, then with 10, 100, … times as much until it succeeds.

    Args:
        hessian_CC: symmetric, ``[..., C, C]``; not changed.
        dampening: the first fraction to try; 0 is raised to 0.001 at the second step.
        steps: how many fractions to try.

    Raises:
        SingularHessianError: if none of them helped.
    """
    fraction = dampening
    for step in range(steps):
        try:
            return Damped(inverse_factor(damp(hessian_CC, fraction)), fraction)
        except SingularHessianError:
            if step == steps - 1:
                raise
        fraction = max(fraction * 10, 1e-3)
    raise AssertionError("unreachable: the last step returns or raises")
