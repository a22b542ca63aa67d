# SPDX-License-Identifier: Apache-2.0
r"""Cholesky factorization and solves with the factor, bitwise equal for any number of threads.

LAPACK splits the work by the number of threads, and rounds accordingly. Here LAPACK only handles
small diagonal blocks, each on one thread; the rest are products of parts that depend on the shape
alone (:mod:`llmcompressor.numerics.products`), which also run at a higher rate than triangular
solves. Right-looking, with K the columns of a panel (Golub & Van Loan, *Matrix Computations*, 4th
ed., Alg. 4.2.4 in blocks):

.. math:: A_{11} = L_{11} L_{11}^\top, \quad L_{21} = A_{21} L_{11}^{-\top}, \quad
      A_{22} \leftarrow A_{22} - L_{21} L_{21}^\top .

Matrices are float32 or float64 ``[..., C, C]``; only the lower triangle of A is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.numerics.products import MANY_ALIKE, matmul, parallel_matmul, subtract_matmul_
from llmcompressor.runtime.threads import one_thread, parallel_spans

PANEL = 128
"""Columns that are factorized at once, on the CPU."""
_WIDE_PANEL = 512
"""The same elsewhere: there a step costs more than its arithmetic."""


def _panel_of(matrix_CC: Tensor) -> int:
    return PANEL if matrix_CC.device.type == "cpu" else _WIDE_PANEL


def cholesky(
    matrix_CC: Tensor, *, panel: int | None = None, overwrite: bool = False
) -> Tensor | None:
    """The lower triangular L with ``L Lᵀ = A``; ``None`` if A is not positive definite or finite.

    With ``overwrite`` the memory of A is used; A is then lost, even if there is no L. ``panel``
    columns are factorized at once; the default depends on the device.

    >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
    tensor([[2., 0.],
            [1., 2.]])
    """
    columns, panel = matrix_CC.shape[-1], panel or _panel_of(matrix_CC)
    lower_CC = matrix_CC if overwrite else matrix_CC.clone()
    for lo in range(0, columns, panel):
        hi = min(lo + panel, columns)
        with one_thread(matrix_CC.device):
            corner_KK, info = torch.linalg.cholesky_ex(lower_CC[..., lo:hi, lo:hi])
        if bool((info != 0).any()):
            return None
        lower_CC[..., lo:hi, lo:hi] = corner_KK
        if hi < columns:
            _eliminate_(lower_CC[..., hi:, lo:hi], lower_CC[..., hi:, hi:], corner_KK)
    lower_CC = lower_CC.tril_()
    return lower_CC if bool(torch.isfinite(lower_CC.sum())) else None


def _eliminate_(below_MK: Tensor, rest_MM: Tensor, corner_KK: Tensor) -> None:
    """``A₂₁ ← A₂₁ L₁₁⁻ᵀ`` by parts of the rows, then ``A₂₂ ← A₂₂ − L₂₁ L₂₁ᵀ`` by columns."""

    def divide(span: slice) -> None:
        part_SK = below_MK[..., span, :]
        part_SK.copy_(torch.linalg.solve_triangular(corner_KK.mT, part_SK, upper=True, left=False))

    parallel_spans(divide, below_MK.shape[-2], below_MK.device)
    left_MK = below_MK.contiguous()

    def subtract(span: slice) -> None:
        lo = span.start or 0
        subtract_matmul_(rest_MM[..., lo:, span], left_MK[..., lo:, :], left_MK[..., span, :].mT)

    parallel_spans(subtract, left_MK.shape[-2], left_MK.device)


def invert_lower_(lower_CC: Tensor, *, smallest: int | None = None) -> Tensor:
    """Invert a lower triangular matrix, zero above its diagonal, in place.

    Recursively by halves, down to ``smallest`` columns: the inverse of ``[[A, 0], [B, D]]`` is
    ``[[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]``.

    >>> invert_lower_(torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    tensor([[ 0.5000,  0.0000],
            [-0.5000,  1.0000]])
    """
    columns, smallest = lower_CC.shape[-1], smallest or _panel_of(lower_CC)
    if columns <= smallest:
        with one_thread(lower_CC.device):
            eye_CC = torch.eye(columns, dtype=lower_CC.dtype, device=lower_CC.device)
            inverse_CC = torch.linalg.solve_triangular(lower_CC, eye_CC, upper=False)
        return lower_CC.copy_(inverse_CC)
    half = -(-columns // (2 * smallest)) * smallest
    first_KK = invert_lower_(lower_CC[..., :half, :half], smallest=smallest)
    last_MM = invert_lower_(lower_CC[..., half:, half:], smallest=smallest)
    below_MK = lower_CC[..., half:, :half]
    parallel_matmul(last_MM, parallel_matmul(below_MK, first_KK), out=below_MK)
    below_MK.neg_()
    return lower_CC


class FactoredSolver:
    """Solves ``L Lᵀ X = B`` repeatedly for one L, by products of blocks in ``dtype``.

    The diagonal blocks are inverted once, and the off-diagonal blocks are stored in reading order;
    the memory of L is not kept. In bfloat16, solutions have an error of some thousandths of B if no
    eigenvalue of ``L Lᵀ`` is below 1, however large the greatest is: rounding errors are then not
    amplified. By default the dtype is L's, and the columns of a diagonal block depend on it and the
    device.
    """

    def __init__(
        self, lower_CC: Tensor, *, block: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        columns, self._dtype = lower_CC.shape[-1], dtype or lower_CC.dtype
        is_coarse = self._dtype.itemsize < lower_CC.dtype.itemsize
        block = block or _panel_of(lower_CC) * (2 if is_coarse else 1)
        self._spans = [(lo, min(lo + block, columns)) for lo in range(0, columns, block)]
        self._corners = [
            self._laid_out(invert_lower_(lower_CC[..., lo:hi, lo:hi].contiguous()))
            for lo, hi in self._spans
        ]
        self._before = [self._laid_out(lower_CC[..., lo:hi, :lo]) for lo, hi in self._spans]
        self._after = [self._laid_out(lower_CC[..., hi:, lo:hi].mT) for lo, hi in self._spans]

    def _laid_out(self, part_MK: Tensor) -> Tensor:
        return part_MK.to(self._dtype).contiguous()

    def solve_(self, right_CR: Tensor) -> Tensor:
        """Replace B, ``[..., C, R]`` of any dtype, by ``(L Lᵀ)⁻¹ B`` in place."""
        parallel_spans(
            lambda span: self._solve_part_(right_CR[..., span]), right_CR.shape[-1], right_CR.device
        )
        return right_CR

    def _solve_part_(self, right_CS: Tensor) -> None:
        work_CS = right_CS.to(self._dtype).contiguous()
        for (lo, hi), corner_KK, before_KC in zip(
            self._spans, self._corners, self._before, strict=True
        ):
            part_KS = work_CS[..., lo:hi, :]
            subtract_matmul_(part_KS, before_KC, work_CS[..., :lo, :], fewest=MANY_ALIKE)
            part_KS.copy_(matmul(corner_KK, part_KS, fewest=MANY_ALIKE))
        for (lo, hi), corner_KK, after_KC in zip(
            reversed(self._spans), reversed(self._corners), reversed(self._after), strict=True
        ):
            part_KS = work_CS[..., lo:hi, :]
            subtract_matmul_(part_KS, after_KC, work_CS[..., hi:, :], fewest=MANY_ALIKE)
            part_KS.copy_(matmul(corner_KK.mT, part_KS, fewest=MANY_ALIKE))
        right_CS.copy_(work_CS)


class InverseSolver:
    """The same as :class:`FactoredSolver` by one product with the inverse: faster for many B.

    L is overwritten.
    """

    def __init__(self, lower_CC: Tensor, *, dtype: torch.dtype) -> None:
        half_CC = invert_lower_(lower_CC).to(dtype)
        self._inverse_CC = torch.empty_like(half_CC)

        def multiply(span: slice) -> None:
            lo = span.start or 0  # zeros above it
            self._inverse_CC[..., span] = half_CC[..., lo:, :].mT @ half_CC[..., lo:, span]

        parallel_spans(multiply, half_CC.shape[-1], half_CC.device)

    def solve_(self, right_CR: Tensor) -> Tensor:
        """Replace B, ``[..., C, R]`` of any dtype, by ``(L Lᵀ)⁻¹ B`` in place."""

        def multiply(span: slice) -> None:
            right_CS = right_CR[..., span]
            right_CS.copy_(self._inverse_CC @ right_CS.to(self._inverse_CC.dtype))

        parallel_spans(multiply, right_CR.shape[-1], right_CR.device)
        return right_CR


# --------------------
# ``D H Dᵀ`` of many rows and one symmetric H, at little more than half of the multiplications.
#
# H is split into block columns j. Blocks above the diagonal count twice, those below are not read:
#
# .. math:: d H d^\top = \sum_j \Bigl(2 \sum_{i<j} d_i H_{ij} + d_j H_{jj}\Bigr) d_j^\top .

WIDTH = 256
"""Columns of a block: wide enough for its product to run at full rate."""


class QuadraticForm:
    """``d H dᵀ`` of each row d of a matrix, H ``[C, C]`` without batch dimensions.

    With ``dtype`` bfloat16 the operands of products and ``d H`` are rounded to it. Each value then
    has a relative error of some thousandths, unless d is nearly orthogonal to the eigenvectors of
    the largest eigenvalues, as what a solver leaves is, and what is rounded to nearest is not.
    """

    def __init__(self, hessian_CC: Tensor, dtype: torch.dtype | None = None) -> None:
        columns = len(hessian_CC)
        self._dtype = dtype or hessian_CC.dtype
        self._blocks = []
        for lo in range(0, columns, WIDTH):
            hi = min(lo + WIDTH, columns)
            block_KW = hessian_CC[:hi, lo:hi].clone()
            block_KW[:lo] *= 2
            self._blocks.append((lo, hi, self._laid_out(block_KW)))

    def _laid_out(self, block_KW: Tensor) -> Tensor:
        if self._dtype == block_KW.dtype:
            return block_KW
        return block_KW.to(self._dtype).T.contiguous().T  # as Linears have their weights

    def __call__(self, change_RC: Tensor) -> Tensor:
        """The value of each row, ``[R]``, in the dtype of H.

        >>> import torch
        >>> QuadraticForm(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))(torch.tensor([[1.0, -1.0]]))
        tensor([3.])
        """
        total_R = change_RC.new_zeros(len(change_RC))
        operand_RC = change_RC.to(self._dtype)
        for lo, hi, block_KW in self._blocks:
            slope_RW = matmul(operand_RC[:, :hi], block_KW, fewest=MANY_ALIKE)
            total_R += slope_RW.to(change_RC.dtype).mul_(change_RC[:, lo:hi]).sum(dim=-1)
        return total_R
