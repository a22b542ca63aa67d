# SPDX-License-Identifier: Apache-2.0
r"""Cholesky factorization with one result for any number of threads.

LAPACK splits the work by the number of threads, and rounds accordingly. Here only small diagonal
blocks are left to it, on one thread; the rest are triangular solves and products, whose results do
not depend on it. Right-looking, with K the columns of a panel (Golub & Van Loan, *Matrix
Computations*, 4th ed., Alg. 4.2.4 in blocks):

.. math:: A_{11} = L_{11} L_{11}^\top, \quad L_{21} = A_{21} L_{11}^{-\top}, \quad
          A_{22} \leftarrow A_{22} - L_{21} L_{21}^\top .
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.threads import one_thread

__all__ = ["PANEL", "cholesky"]

PANEL = 512
"""Columns that are factorized at once."""


def cholesky(matrix_CC: Tensor, *, panel: int = PANEL, overwrite: bool = False) -> Tensor | None:
    """The lower triangular L with ``L Lᵀ = A``.

    Args:
        matrix_CC: A, symmetric, float32 or float64, ``[..., C, C]``.
        panel: columns that are factorized at once.
        overwrite: use the memory of A for L; A is lost then, also if there is no L.

    Returns:
        L, or ``None`` if one of the matrices is not positive definite, or not finite.

    >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
    tensor([[2., 0.],
            [1., 2.]])
    """
    columns = matrix_CC.shape[-1]
    lower_CC = matrix_CC if overwrite else matrix_CC.clone()
    for lo in range(0, columns, panel):
        hi = min(lo + panel, columns)
        with one_thread(matrix_CC.device):
            corner_KK, info = torch.linalg.cholesky_ex(lower_CC[..., lo:hi, lo:hi])
        if bool((info != 0).any()):
            return None
        lower_CC[..., lo:hi, lo:hi] = corner_KK
        if hi == columns:
            break
        below_MK = torch.linalg.solve_triangular(
            corner_KK.mT, lower_CC[..., hi:, lo:hi], upper=True, left=False
        )
        lower_CC[..., hi:, lo:hi] = below_MK
        lower_CC[..., hi:, hi:] -= below_MK @ below_MK.mT
    lower_CC = lower_CC.tril_()
    return lower_CC if bool(torch.isfinite(lower_CC.sum())) else None
