# SPDX-License-Identifier: Apache-2.0
r"""``D H Dᵀ`` of many rows and one symmetric H, at little more than half of the multiplications.

H is split into block columns j. Blocks above the diagonal count twice, those below are not read:

.. math:: d H d^\top = \sum_j \Bigl(2 \sum_{i<j} d_i H_{ij} + d_j H_{jj}\Bigr) d_j^\top .
"""

from __future__ import annotations

from torch import Tensor

from llmcompressor.numerics.products import MANY_ALIKE, matmul

__all__ = ["WIDTH", "QuadraticForm"]

WIDTH = 256
"""Columns of a block: wide enough for its product to run at full rate."""


class QuadraticForm:
    """``d H dᵀ`` of each row d of a matrix.

    Args:
        hessian_CC: H, symmetric, float32 or float64 ``[C, C]``.
    """

    def __init__(self, hessian_CC: Tensor) -> None:
        columns = len(hessian_CC)
        self._blocks = []
        for lo in range(0, columns, WIDTH):
            hi = min(lo + WIDTH, columns)
            block_KW = hessian_CC[:hi, lo:hi].clone()
            block_KW[:lo] *= 2
            self._blocks.append((lo, hi, block_KW))

    def __call__(self, change_RC: Tensor) -> Tensor:
        """The value of each row, ``[R]``, in the dtype of H.

        >>> import torch
        >>> QuadraticForm(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))(torch.tensor([[1.0, -1.0]]))
        tensor([3.])
        """
        total_R = change_RC.new_zeros(len(change_RC))
        for lo, hi, block_KW in self._blocks:
            slope_RW = matmul(change_RC[:, :hi], block_KW, fewest=MANY_ALIKE)
            total_R += slope_RW.mul_(change_RC[:, lo:hi]).sum(dim=-1)
        return total_R
