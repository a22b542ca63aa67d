# SPDX-License-Identifier: Apache-2.0
r"""Cayley SGD with momentum: gradient steps on orthogonal matrices.

Li, Fuxin and Todorovic, arXiv:2002.01113, algorithm 1, as used by SpinQuant (arXiv:2405.16406,
equation 3). With the gradient G of a loss at the orthogonal Q and momentum M

.. math::
    M \leftarrow \beta M - G,\qquad
    \hat W = M Q^\top - \tfrac12\, Q\, (Q^\top M Q^\top),\qquad W = \hat W - \hat W^\top

W is skew-symmetric, so its Cayley transform is orthogonal, and so is

.. math:: Q' = (I - \tfrac{\alpha}{2} W)^{-1} (I + \tfrac{\alpha}{2} W)\, Q .

The papers iterate to a fixed point; here the system is solved, in float64, which keeps Q
orthogonal up to rounding at any step size.

Legend: N order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cayley_step", "orthogonality_error"]

_MOST = 0.5
"""The largest alpha ||W||: about half a radian per step."""


def cayley_step(
    Q_NN: Tensor, gradient_NN: Tensor, momentum_NN: Tensor, rate: float, *, decay: float = 0.9
) -> tuple[Tensor, Tensor]:
    """Take a step of Cayley SGD.

    Args:
        Q_NN: orthogonal, float64 ``[N, N]``.
        gradient_NN: of the loss with respect to Q, ``[N, N]``.
        momentum_NN: of the step before, float64 ``[N, N]``; zeros at first.
        rate: alpha; reduced if the step would exceed half a radian.
        decay: beta.

    Returns:
        The new Q and its momentum, float64, both new.

    >>> Q, M = cayley_step(torch.eye(2).double(), torch.zeros(2, 2), torch.zeros(2, 2), 1.0)
    >>> torch.equal(Q, torch.eye(2).double())
    True
    """
    Q_NN = Q_NN.double()
    M_NN = decay * momentum_NN.double() - gradient_NN.double()
    half_NN = M_NN @ Q_NN.T - 0.5 * Q_NN @ (Q_NN.T @ M_NN @ Q_NN.T)
    W_NN = half_NN - half_NN.T
    size = float(torch.linalg.matrix_norm(W_NN))
    alpha = min(rate, _MOST / size) if size > 0 else rate
    eye_NN = torch.eye(len(Q_NN), dtype=torch.float64, device=Q_NN.device)
    moved_NN = torch.linalg.solve(eye_NN - 0.5 * alpha * W_NN, Q_NN + 0.5 * alpha * W_NN @ Q_NN)
    return moved_NN, W_NN @ Q_NN


def orthogonality_error(Q_NN: Tensor) -> float:
    """The largest entry of ``|Q Qᵀ - I|``.

    >>> orthogonality_error(torch.eye(3))
    0.0
    """
    wide_NN = Q_NN.double()
    eye_NN = torch.eye(len(wide_NN), dtype=torch.float64, device=wide_NN.device)
    return float((wide_NN @ wide_NN.T - eye_NN).abs().max())
