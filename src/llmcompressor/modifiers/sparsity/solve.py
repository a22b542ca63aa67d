# SPDX-License-Identifier: Apache-2.0
"""SparseGPT solver for Linears that share an input: rows stacked, one factorization for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.core.contract import ELEMENTWISE, Cost, DataSize
from llmcompressor.numerics.batching import (
    BATCH_ELEMENTS,
    batch_by_kind,
    solve_batched_or_single,
)
from llmcompressor.numerics.column_sweep import stack_float32_rows
from llmcompressor.numerics.gptq import corrected_weight, ridge_for_tokens
from llmcompressor.numerics.gram import triangle_bytes
from llmcompressor.numerics.hessian import (
    SingularHessianError,
    factorize_with_rising_dampening,
    fill_dead_columns,
)
from llmcompressor.numerics.masks import Sparsity, keep_mask
from llmcompressor.numerics.products import fast_matmul_dtype
from llmcompressor.numerics.sparse_fit import REFIT_STEPS, ROUNDS_PER_FACTOR, sparse_fit
from llmcompressor.numerics.sparsegpt import SparseResult, sparse_sweep
from llmcompressor.runtime.threads import SPAN, one_thread

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
    for batch in batch_by_kind(kinds, [problem.gram_CC.shape[-1] for problem in problems]):
        found = _solve_batch([problems[index] for index in batch], options)
        solutions.update(zip(batch, found, strict=True))
    return [solutions[index] for index in range(len(problems))]


def _solve_batch(problems: Sequence[Problem], options: Options) -> list[Solution]:
    def pruned(some: Sequence[Problem]) -> list[Solution]:
        with one_thread(some[0].gram_CC.device):
            return _solve_stacked(some, options)

    return solve_batched_or_single(problems, pruned, lambda one: _prune_by_score(one, options))


def _solve_stacked(problems: Sequence[Problem], options: Options) -> list[Solution]:
    """Solve all of ``problems`` at once; a single one without a batch dimension."""
    steps = _STEPS if len(problems) == 1 else 1  # do not raise the dampening for a whole batch
    gram_CC = _stack([problem.gram_CC for problem in problems])
    weight_RC = _stack([stack_float32_rows(one.weights) for one in problems])
    gone_RC = weight_RC == 0 if options.preserve else None
    if problems[0].cross_CC is not None:
        cross_CC = _stack([p.cross_CC for p in problems if p.cross_CC is not None])
        ridge = ridge_for_tokens(options.ridge, gram_CC, [problem.tokens for problem in problems])
        weight_RC = corrected_weight(weight_RC, gram_CC, cross_CC, ridge, steps=steps)
    sparsity = problems[0].sparsity
    if options.refinements == 0:
        factor_CC, dampening = factorize_with_rising_dampening(
            gram_CC, options.dampening, steps=steps
        )
        result = sparse_sweep(
            weight_RC, factor_CC, sparsity, gone_RC=gone_RC, block=options.block_size
        )
    else:
        result, dampening = _fit_with_raise(weight_RC, gram_CC, sparsity, gone_RC, options, steps)
    batched = gram_CC.ndim == 3
    weights = result.weight_RC if batched else result.weight_RC.unsqueeze(0)
    losses = result.loss_R if batched else result.loss_R.unsqueeze(0)
    return [
        _solution(one, weight, loss, dampening)
        for one, weight, loss in zip(problems, weights, losses, strict=True)
    ]


def _fit_with_raise(
    weight_RC: Tensor,
    gram_CC: Tensor,
    sparsity: Sparsity,
    gone_RC: Tensor | None,
    options: Options,
    steps: int,
) -> tuple[SparseResult, float]:
    """Fit with the dampening raised tenfold while it is too small."""
    dampening = options.dampening
    dtype = fast_matmul_dtype(gram_CC.device, weight_RC.shape[-1] ** 2 * weight_RC.shape[-2])
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


def _prune_by_score(problem: Problem, options: Options) -> Solution:
    """Wanda's mask without compensation: the fallback if no factorization succeeds."""
    weight_RC = torch.cat([weight.float() for weight in problem.weights])
    gone_CR = (weight_RC == 0).mT if options.preserve else None
    norm_C = fill_dead_columns(problem.gram_CC.diagonal().clamp_min(0)).sqrt()
    score_CR = (weight_RC.abs() * norm_C).mT.contiguous()
    kept_CR = keep_mask(score_CR, problem.sparsity, gone_CR=gone_CR)
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


# --------------------
# Cost of SparseGPT, for C columns and R rows of all Linears with one input.
#
# step                                  multiply-adds       further bytes
# second moments                        36/64 C² a token    4 C²
# cross products, twin streams          C² a token          4 C²
# correction, twin streams              C³/3 + 2 R C²       less than below
# a factor, for three rounds            C³/3                20 C² + 12 R C
# a round, choosing in groups           R C²                12 C² + 14 R C + 16 C a thread's row
# a round, choosing anywhere            R C²                16 C² + 21 R C + 20 E, E at most 2¹⁹
# the fit at the end                    3 R C²              4 C² + 18 R C
# the sweep, where there are no rounds  C³/3 + R C²/2       4 C² + 17 R C
# the same, choosing anywhere                               4 C² + 13 R C + 28 R P, blocks of P

_FLOAT = 4
_VISITS_OF_SWEEP = 24
_VISITS_OF_ROUND = 24
_CHOSEN_AT_ONCE = 2**19
_BLOCK = 128


def sparsegpt_cost(
    matrices: Sequence[Tensor], data: DataSize, *, twin: bool, refinements: int, grouped: bool
) -> Cost:
    """Cost of pruning Linears with one input.

    Args:
        matrices: each ``[R_i, C]``; only their shapes matter.
        data: size of the calibration data.
        twin: also use the inputs of the original model.
        refinements: rounds of splitting.
        grouped: weights are compared within N:M groups only.
    """
    if not matrices:
        return Cost()
    columns = max(matrix.shape[1] for matrix in matrices)
    elements = sum(matrix.numel() for matrix in matrices)
    square, streams, itemsize = columns**2, 1 + twin, matrices[0].element_size()
    cube, products = square * columns, elements * columns
    if refinements:
        factors = -(-refinements // ROUNDS_PER_FACTOR)
        solve = factors * cube // 3 + (refinements + 1 + REFIT_STEPS) * products
    else:
        solve = cube // 3 + products // 2
    if twin:
        solve += cube // 3 + 2 * products
    visits = elements * (refinements * _VISITS_OF_ROUND or _VISITS_OF_SWEEP)
    workspace = _workspace(columns, elements, refinements, grouped=grouped)
    return Cost(
        flops=data.tokens * square * (36 + 64 * twin) // 64 + solve + ELEMENTWISE * visits,
        held_bytes=streams * (_FLOAT * square + data.buffered * columns * itemsize),
        peak_bytes=min(data.alike, max(1, BATCH_ELEMENTS // square)) * workspace,
        summed_bytes=triangle_bytes(columns) + twin * _FLOAT * square,
    )


def _workspace(columns: int, elements: int, refinements: int, *, grouped: bool) -> int:
    """The largest of the table's byte counts over all steps that occur."""
    square = columns**2
    if refinements == 0:
        end = 4 * square + 17 * elements
        in_block = 4 * square + 13 * elements + 28 * _BLOCK * elements // columns
        return end if grouped else max(end, in_block)
    at_once = columns * min(elements // columns, SPAN * torch.get_num_threads())
    if grouped:
        in_round = 12 * square + 14 * elements + 16 * at_once
    else:
        in_round = 16 * square + 21 * elements + 20 * min(elements, _CHOSEN_AT_ONCE)
    return max(20 * square + 12 * elements, in_round, 4 * square + 18 * elements)
