# SPDX-License-Identifier: Apache-2.0
"""SparseGPT solver for Linears that share an input: rows stacked, one factorization for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.numerics.asymmetric import corrected_weight_with_raise, ridge_for
from llmcompressor.numerics.batching import batches_alike, together_or_apart, wide_rows
from llmcompressor.numerics.hessian import (
    SingularHessianError,
    dead_columns,
    raise_dampening,
)
from llmcompressor.numerics.products import quick_dtype
from llmcompressor.numerics.sparse_choice import Sparsity, keep_best
from llmcompressor.numerics.sparse_fit import sparse_fit
from llmcompressor.numerics.sparsegpt import SparseResult, sparse_sweep
from llmcompressor.threads import one_thread

__all__ = ["Options", "Problem", "Solution", "solve"]

_STEPS = 4
"""How often dampening is tried before giving up."""


@dataclass(frozen=True)
class Options:
    """Solver options that do not depend on the module."""

    block_size: int
    dampening: float
    ridge: float
    """Of asymmetric calibration, as a fraction of the mean diagonal; used where there is a cross
    product."""
    refinements: int
    """Rounds of splitting; 0 for the sweep of the paper."""
    preserve: bool
    """Whether what is zero stays zero, and counts."""


@dataclass(frozen=True)
class Problem:
    """Linears that share an input, to be solved together."""

    weights: Sequence[Tensor]
    """Each ``[R_i, C]``, any floating dtype."""
    sparsity: Sparsity
    """A share for each weight."""
    gram_CC: Tensor
    cross_CC: Tensor | None
    tokens: int
    """Of which the Gram matrix is the sum."""

    @property
    def kind(self) -> object:
        """Key that is equal for problems that can be batched."""
        shape, device = self.gram_CC.shape, self.gram_CC.device
        return shape, self.sparsity, self.cross_CC is None, device


@dataclass(frozen=True)
class Solution:
    """Result for one :class:`Problem`."""

    weights: list[Tensor]
    """float32, zero where pruned."""
    losses: list[float]
    """``½ tr(D H Dᵀ)`` of each weight, D its distance from what was wanted, H damped."""
    dampening: float | None
    """What worked; ``None`` when nothing did, and weights were chosen by score and not changed."""


def solve(problems: Sequence[Problem], options: Options) -> list[Solution]:
    """Solve ``problems``; small ones of one kind in one batch."""
    solutions: dict[int, Solution] = {}
    kinds = [problem.kind for problem in problems]
    for batch in batches_alike(kinds, [problem.gram_CC.shape[-1] for problem in problems]):
        found = _solve_batch([problems[index] for index in batch], options)
        solutions.update(zip(batch, found, strict=True))
    return [solutions[index] for index in range(len(problems))]


def _solve_batch(problems: Sequence[Problem], options: Options) -> list[Solution]:
    def pruned(some: Sequence[Problem]) -> list[Solution]:
        with one_thread(some[0].gram_CC.device):
            return _pruned(some, options)

    return together_or_apart(problems, pruned, lambda one: _chosen_by_score(one, options))


def _pruned(problems: Sequence[Problem], options: Options) -> list[Solution]:
    """Solve all of ``problems`` at once; a single one without a batch dimension."""
    steps = _STEPS if len(problems) == 1 else 1  # do not raise the dampening for a whole batch
    gram_CC = _stack([problem.gram_CC for problem in problems])
    weight_RC = _stack([wide_rows(one.weights) for one in problems])
    gone_RC = weight_RC == 0 if options.preserve else None
    if problems[0].cross_CC is not None:
        cross_CC = _stack([p.cross_CC for p in problems if p.cross_CC is not None])
        ridge = ridge_for(options.ridge, gram_CC, [problem.tokens for problem in problems])
        weight_RC = corrected_weight_with_raise(weight_RC, gram_CC, cross_CC, ridge, steps=steps)
    weight_RC.masked_fill_(dead_columns(gram_CC).unsqueeze(-2), 0)
    sparsity = problems[0].sparsity
    if options.refinements == 0:
        factor_CC, dampening = raise_dampening(gram_CC, options.dampening, steps=steps)
        result = sparse_sweep(
            weight_RC, factor_CC, sparsity, gone_RC=gone_RC, block=options.block_size
        )
    else:
        result, dampening = _fitted(weight_RC, gram_CC, sparsity, gone_RC, options, steps)
    batched = gram_CC.ndim == 3
    weights = result.weight_RC if batched else result.weight_RC.unsqueeze(0)
    losses = result.loss_R if batched else result.loss_R.unsqueeze(0)
    return [
        _solution(one, weight, loss, dampening)
        for one, weight, loss in zip(problems, weights, losses, strict=True)
    ]


def _fitted(
    weight_RC: Tensor,
    gram_CC: Tensor,
    sparsity: Sparsity,
    gone_RC: Tensor | None,
    options: Options,
    steps: int,
) -> tuple[SparseResult, float]:
    """Fit with the dampening raised tenfold while it is too small."""
    dampening = options.dampening
    dtype = quick_dtype(gram_CC.device, weight_RC.shape[-1] ** 2 * weight_RC.shape[-2])
    for step in range(steps):
        try:
            result = sparse_fit(
                weight_RC,
                gram_CC,
                sparsity,
                rounds=options.refinements,
                dampening=dampening,
                gone_RC=gone_RC,
                dtype=dtype,
            )
        except SingularHessianError:
            if step == steps - 1:
                raise
            dampening = max(dampening * 10, 1e-3)
        else:
            return result, dampening
    raise AssertionError("unreachable: the last step returns or raises")


def _chosen_by_score(problem: Problem, options: Options) -> Solution:
    """Wanda's mask without compensation: the fallback if no factorization succeeds."""
    weight_RC = torch.cat([weight.float() for weight in problem.weights])
    gone_CR = (weight_RC == 0).mT if options.preserve else None
    norm_C = problem.gram_CC.diagonal().clamp_min(0).sqrt()
    score_CR = (weight_RC.abs() * norm_C).mT.contiguous()
    kept_CR = keep_best(score_CR, problem.sparsity, gone_CR=gone_CR)
    pruned_RC = weight_RC * kept_CR.mT
    change_RC = pruned_RC - weight_RC
    loss_R = 0.5 * ((change_RC @ problem.gram_CC) * change_RC).sum(dim=-1)
    return _solution(problem, pruned_RC, loss_R, None)


def _solution(
    problem: Problem, weight_RC: Tensor, loss_R: Tensor, dampening: float | None
) -> Solution:
    rows = [len(weight) for weight in problem.weights]
    losses = [float(part.sum()) for part in torch.split(loss_R, rows)]
    return Solution(list(torch.split(weight_RC, rows)), losses, dampening)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))
