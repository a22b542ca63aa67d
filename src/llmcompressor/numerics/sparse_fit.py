# SPDX-License-Identifier: Apache-2.0
r"""Sparse regression of a weight: ADMM for the mask, conjugate gradients for the values.

The goal is the Q with the prescribed number of zeros that minimizes ``½ tr((Q − W) H (Q − W)ᵀ)``.

**The mask** is found by splitting (ADMM, as in ALPS, arXiv:2406.07831, Alg. 1): X is free, Z has
the zeros, V pulls the two together, with increasing ρ. All columns are first scaled so that
diag H = 1. With P keeping the entries of largest magnitude,

.. math::
    X \leftarrow W + (H + \rho I)^{-1} (\rho (Z - W) - V), \qquad
    \hat X \leftarrow \alpha X + (1 - \alpha) Z, \qquad
    Z \leftarrow P(\hat X + V / \rho), \qquad
    V \leftarrow V + \rho (\hat X - Z) .

α is over-relaxation (Eckstein & Bertsekas, *Mathematical Programming* 55, 1992; on convex problems
splitting converges with any below 2): 1.8 for few rounds, which then achieve as much as a third
more rounds without it, and nearer to 1 for many. Z and V are zero where the other is not, so one
array holds both. ρ rises in every third round, so that one factorization serves three. The start is
Z = P(W), which in these coordinates is Wanda's mask, and the end is

.. math::
    Z = P(X + H (W - X)), \qquad H (W - X) = \rho (X - Z) + V ,

a step down the gradient from X, which V has kept from its minimum: weights under a strong penalty
are chosen by their value, and for H = I this is again Wanda's mask, which is then optimal. No
eigenvalue of H / ρ + I is below 1, so that X may be solved for in bfloat16: rounding errors are not
amplified, however ill-conditioned H is. Conjugate gradients multiply by H, and stay in float32.

**The values** for a given mask are a linear least-squares problem of each row: ``(H (Q − W)ᵀ)``
is zero where Q is kept. Conjugate gradients solve it for all rows at once, with the mask applied to
residuals and directions (Golub & Van Loan, *Matrix Computations*, 4th ed., Alg. 11.3.3). The error
never rises. At its minimum the errors of later changes, a quantization that keeps the zeros for
instance, are added to the remaining error without a cross term.

Internally, weights are transposed (``[C, R]``); a leading batch dimension works on many at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompressor.numerics.cholesky import FactoredSolver, InverseSolver, cholesky
from llmcompressor.numerics.column_sweep import columns_first, rows_first
from llmcompressor.numerics.hessian import SingularHessianError, damp
from llmcompressor.numerics.masks import Sparsity, keep_mask, keep_mask_by_group
from llmcompressor.numerics.products import MANY_ALIKE, matmul
from llmcompressor.numerics.sparsegpt import SparseResult
from llmcompressor.runtime.threads import parallel_spans

_LAST_PENALTY = 0.8
_MOST_RELAXED = 1.8
_LONG_STEPS = 6
ROUNDS_PER_FACTOR = 3
"""With these the first penalty is the last. The more rounds there are, the lower it may begin."""
REFIT_STEPS = 2
_TINY = 1e-30
_Solver = FactoredSolver | InverseSolver


def sparse_fit(
    weight_RC: Tensor,
    hessian_CC: Tensor,
    sparsity: Sparsity,
    *,
    rounds: int = 3,
    steps: int = REFIT_STEPS,
    dampening: float = 0.01,
    gone_RC: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> SparseResult:
    """Choose the weights to keep, and fit their values.

    Args:
        weight_RC: W, float32 ``[..., R, C]``.
        hessian_CC: H, float32 ``[..., C, C]``; not changed.
        sparsity: the exact number of weights to remove.
        rounds: rounds of splitting; 0 uses Wanda's mask.
        steps: steps of conjugate gradients at the end.
        dampening: added to the diagonal of H, as a fraction of its mean.
        gone_RC: bool ``[..., R, C]``: weights that are zero in any case, included in the number.
        dtype: dtype of the products that find the mask; values are fitted in float32.

    Raises:
        SingularHessianError: H with the first penalty is not positive definite, or not finite.
    """
    scaled = _scaled(weight_RC, hessian_CC, dampening)
    gone_CR = None if gone_RC is None else gone_RC.mT.contiguous()
    value_CR, kept_CR = _admm(scaled, sparsity, rounds, gone_CR, dtype)
    loss_R = value_CR.new_empty(value_CR.shape[:-2] + value_CR.shape[-1:])

    def descend(rows: slice) -> None:
        loss_R[..., rows] = _descend_(
            scaled.hessian_CC,
            scaled.weight_CR[..., rows],
            value_CR[..., rows],
            kept_CR[..., rows].contiguous(),
            steps,
        )

    parallel_spans(descend, value_CR.shape[-1], value_CR.device)
    value_CR.div_(scaled.scale_C1)
    kept_RC = rows_first(kept_CR, None).bool()
    return SparseResult(rows_first(value_CR, None), kept_RC, loss_R.clamp_min_(0).mul_(0.5))


class _Scaled(NamedTuple):
    """A problem whose Hessian is scaled to a diagonal of one."""

    weight_CR: Tensor
    hessian_CC: Tensor
    scale_C1: Tensor


def _scaled(weight_RC: Tensor, hessian_CC: Tensor, dampening: float) -> _Scaled:
    hessian_CC = damp(hessian_CC, dampening)
    scale_C1 = hessian_CC.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-1)
    hessian_CC.div_(scale_C1).div_(scale_C1.mT)
    return _Scaled(columns_first(weight_RC, None).mul_(scale_C1), hessian_CC, scale_C1)


def _admm(
    problem: _Scaled,
    sparsity: Sparsity,
    rounds: int,
    gone_CR: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The values and the mask at the end of the splitting."""
    kept_CR = _keep_mask(problem.weight_CR.abs(), sparsity, gone_CR)
    both_CR = problem.weight_CR * kept_CR
    solver, before = None, _penalty(0, rounds)
    relaxation = min(_MOST_RELAXED, 1 + _LONG_STEPS / max(rounds, 1))  # α: larger for fewer rounds
    for begin in range(0, rounds, ROUNDS_PER_FACTOR):
        penalty = _penalty(begin, rounds)
        del solver  # free it before another of its size is created
        solver = _solver(problem, penalty, dtype)

        def advance(
            rows: slice,
            solver: _Solver = solver,
            penalty: float = penalty,
            softer: float = before / penalty,
            numbers: range = range(begin, min(begin + ROUNDS_PER_FACTOR, rounds)),
        ) -> None:
            weight_CP, both_CP, keeps_CP = (
                one[..., rows].contiguous() for one in (problem.weight_CR, both_CR, kept_CR)
            )
            gone = None if gone_CR is None else gone_CR[..., rows].contiguous()
            if softer != 1:
                _rescale_dual_(both_CP, keeps_CP.clone(), softer)
            for number in numbers:
                apart_CP, step = _primal_residual(both_CP, keeps_CP, weight_CP, solver), relaxation
                if number == rounds - 1:  # P(Z + (1 + ρ) (X - Z) + V)
                    step = 1 + penalty
                    _rescale_dual_(both_CP, keeps_CP, penalty)
                both_CP.add_(apart_CP, alpha=step)
                keeps_CP = _keep_mask(torch.abs(both_CP, out=apart_CP), sparsity, gone)
            both_CR[..., rows], kept_CR[..., rows] = both_CP, keeps_CP

        if sparsity.group is None:
            advance(slice(None))  # rows compete with each other
        else:
            parallel_spans(advance, both_CR.shape[-1], both_CR.device)
        before = penalty
    return both_CR.mul_(kept_CR), kept_CR


def _rescale_dual_(both_CR: Tensor, kept_CR: Tensor, factor: float) -> None:
    """Multiply V / ρ in ``both_CR`` by ``factor``; ``kept_CR`` is overwritten."""
    both_CR.mul_(kept_CR.mul_(1 - factor).add_(factor))


def _primal_residual(
    both_CR: Tensor, kept_CR: Tensor, weight_CR: Tensor, solver: _Solver
) -> Tensor:
    """The difference X - Z of a round.

    ``both_CR`` holds Z where it is kept and V / ρ elsewhere: each is zero where the other is not,
    since V / ρ becomes the part that P removes from X̂ + V / ρ.
    """
    away_CR = torch.addcmul(both_CR, both_CR, kept_CR, value=-2).add_(weight_CR)  # W - Z + V / ρ
    found_CR = torch.sub(weight_CR, solver.solve_(away_CR), out=away_CR)  # X
    return found_CR.addcmul_(both_CR, kept_CR, value=-1)


def _keep_mask(score_CR: Tensor, sparsity: Sparsity, gone_CR: Tensor | None) -> Tensor:
    """Mask of 1 for kept weights, else 0, float32 as ``score_CR``."""
    if sparsity.group is not None:
        return keep_mask_by_group(score_CR, sparsity.group, gone_CR)
    return keep_mask(score_CR, sparsity, gone_CR=gone_CR).to(score_CR.dtype)


def _penalty(number: int, rounds: int) -> float:
    """The penalty ρ of a round, from ``2.4 / rounds`` to 0.8 by equal factors."""
    last = (rounds - 1) // ROUNDS_PER_FACTOR
    share = number // ROUNDS_PER_FACTOR / max(last, 1)
    first = _LAST_PENALTY * min(ROUNDS_PER_FACTOR / max(rounds, 1), 1.0)
    return first * math.pow(_LAST_PENALTY / first, share)


def _solver(problem: _Scaled, penalty: float, dtype: torch.dtype) -> _Solver:
    """A solver for H / ρ + I, whose smallest eigenvalue is 1, so that 16-bit products suffice."""
    pressed_CC = problem.hessian_CC / penalty
    pressed_CC.diagonal(dim1=-2, dim2=-1).add_(1)
    lower_CC = cholesky(pressed_CC, overwrite=True)
    if lower_CC is None:
        raise SingularHessianError("The Hessian with its penalty is not positive definite.")
    columns, rows = problem.weight_CR.shape[-2:]
    if dtype.itemsize < lower_CC.dtype.itemsize and rows >= columns:
        return InverseSolver(lower_CC, dtype=dtype)
    return FactoredSolver(lower_CC, dtype=dtype)


def _descend_(
    hessian_CC: Tensor, weight_CR: Tensor, value_CR: Tensor, kept_CR: Tensor, steps: int
) -> Tensor:
    """Improve ``value_CR`` by conjugate gradients in place; return ``tr(D H Dᵀ)`` of each row."""
    change_CR = weight_CR - value_CR
    residual_CR = matmul(hessian_CC, change_CR, fewest=MANY_ALIKE)
    loss_R = (change_CR.mul_(residual_CR)).sum(dim=-2)
    residual_CR.mul_(kept_CR)
    direction_CR = residual_CR.clone()
    size_R = residual_CR.square().sum(dim=-2)
    for _ in range(steps):
        image_CR = matmul(hessian_CC, direction_CR, fewest=MANY_ALIKE).mul_(kept_CR)
        curvature_R = (image_CR * direction_CR).sum(dim=-2)
        step_R = (size_R / curvature_R.clamp_min(_TINY)).unsqueeze(-2)
        value_CR.addcmul_(step_R, direction_CR)
        residual_CR.addcmul_(step_R, image_CR, value=-1)
        loss_R -= step_R.squeeze(-2) * size_R
        before_R, size_R = size_R, residual_CR.square().sum(dim=-2)
        turn_R = (size_R / before_R.clamp_min(_TINY)).unsqueeze(-2)
        direction_CR.mul_(turn_R).add_(residual_CR)
    return loss_R
