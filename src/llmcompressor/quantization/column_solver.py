# SPDX-License-Identifier: Apache-2.0
"""Solver for Linears that share an input: one factorization, one sweep of their stacked rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import Tensor

from llmcompressor.core.contract import ELEMENTWISE, Cost, DataSize
from llmcompressor.numerics.batching import (
    BATCH_ELEMENTS,
    batch_by_kind,
    solve_batched_or_single,
)
from llmcompressor.numerics.cholesky import PANEL
from llmcompressor.numerics.column_sweep import stack_float32_rows
from llmcompressor.numerics.gptq import (
    ColumnScales,
    Refined,
    activation_order,
    conditional_optimum,
    corrected_weight,
    refine,
    ridge_for_tokens,
    sweep_and_refine,
)
from llmcompressor.numerics.gram import triangle_bytes
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.hessian import (
    DampedFactor,
    dead_columns,
    factorize_with_rising_dampening,
    fill_dead_columns,
)
from llmcompressor.numerics.output_hessian import (
    BLOCK,
    blocks_of,
    put_rows_,
    row_strips,
    take_rows,
)
from llmcompressor.numerics.weighted_scales import weighted_scales
from llmcompressor.observers.input_statistics import prefers_output_residual
from llmcompressor.quantization.parameters import WeightParameters
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.threads import SPAN, one_thread
from llmcompressor.schemes.bridge import grid_of, partition_of


@dataclass(frozen=True)
class Options:
    """The choices of a GPTQ run that do not depend on the module."""

    block_size: int
    dampening: float
    ridge: float | None
    """λ of asymmetric calibration as a fraction of the mean diagonal; ``None`` without it."""
    refinements: int | None = 0
    """Rounds of coordinate descent after the sweep; see :func:`refinement_rounds`."""
    refit: bool | None = False
    """Whether scales are fitted again to the codes, where that can be done. ``None``: where it
    measures better, on grids of few bits and where scales were not searched for."""
    batch: int | None = None
    """How many problems of equal shape are solved in one call; as many as are small if ``None``."""
    settles: bool = False
    """Whether what every weight would be, given all the other codes, is wanted too."""


@dataclass(frozen=True)
class Problem:
    """The Linears with one input, to be solved together."""

    weights: Sequence[Tensor]
    """Each ``[R_i, C]``, any floating dtype."""
    parameters: Sequence[WeightParameters]
    """Of each weight; all on one grid."""
    gram_CC: Tensor
    cross_CC: Tensor | None
    tokens: int
    """Of which the Gram matrix is the sum."""
    ordered: bool
    """Whether columns are taken by falling activation (``actorder``)."""
    searches: bool = False
    """Whether scales are to be searched for, and the parameters hold those of the extremes."""
    missing_CR: Tensor | None = None
    """``YᵀE``, where E is what the output of all rows is to make up for, float32; in place of the
    cross product."""
    output_NBB: Sequence[Tensor] = ()
    """Blocks of the second moments of the output's gradients, of each weight, float32
    (:mod:`llmcompressor.numerics.output_hessian`); without them all outputs count alike."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows of all weights, and number of columns."""
        return sum(len(weight) for weight in self.weights), self.gram_CC.shape[-1]

    @property
    def grid(self) -> Grid:
        """The grid that the weights are rounded to."""
        return grid_of(self.parameters[0].args)

    def parts(self, count: int) -> list[Problem]:
        """Parts with about as many rows of each weight; none if a weight has too few."""
        pairs = zip(self.weights, self.parameters, strict=True)
        joined = BLOCK if self.output_NBB else 1  # rows whose gradients are compared
        each = [_row_parts(weight, own, count, joined) for weight, own in pairs]
        if not all(each):
            return []
        begins = list(accumulate(map(len, self.weights), initial=0))[:-1]
        return [
            replace(
                self,
                weights=[one[at] for one, (at, _) in zip(self.weights, spans, strict=True)],
                parameters=[own for _, own in spans],
                missing_CR=None
                if self.missing_CR is None
                else torch.cat(
                    [
                        self.missing_CR[:, begin + at.start : begin + at.stop]
                        for begin, (at, _) in zip(begins, spans, strict=True)
                    ],
                    dim=1,
                ),
                output_NBB=[
                    one[at.start // BLOCK : blocks_of(at.stop)]
                    for one, (at, _) in zip(self.output_NBB, spans, strict=bool(self.output_NBB))
                ],
            )
            for spans in zip(*each, strict=True)
        ]

    @property
    def has_own_scales(self) -> bool:
        """True if each row has scales of its own, equally many, on an integer grid."""
        groups = {each.scale.shape[-1] for each in self.parameters}
        return (
            self.grid.kind == "int"
            and len(groups) == 1
            and all(
                each.args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)
                for each in self.parameters
            )
        )

    @property
    def has_searched_scales(self) -> bool:
        """True if the solver searches the scales, of equal groups."""
        groups = self.parameters[0].scale.shape[-1]
        is_even = self.shape[1] % groups == 0
        is_searchable = has_searchable_scales(self.parameters[0].args)
        return self.searches and self.has_own_scales and is_even and is_searchable

    @property
    def kind(self) -> object:
        """A key for stacking: equal for the same shape, cells, grid, order, streams and device."""
        pairs = zip(self.weights, self.parameters, strict=True)
        cells = tuple((len(weight), partition_of(each.args)) for weight, each in pairs)
        corrected = (self.cross_CC is None, self.missing_CR is None, bool(self.output_NBB))
        own = (self.grid, self.ordered, self.searches, corrected, self.gram_CC.device)
        return self.shape, cells, own


def _row_parts(
    weight: Tensor, parameters: WeightParameters, count: int, joined: int
) -> list[tuple[slice, WeightParameters]]:
    """The rows of each part of a weight, with their parameters; empty if there are too few.

    A part has whole blocks of ``joined`` rows, but for the last one.
    """
    height = partition_of(parameters.args).rows
    together = math.lcm(max(height, 1), joined)
    cells = -(-len(weight) // together)
    if cells < count or len(weight) % max(height, 1):
        return []
    found = []
    for first, last in pairwise(cells * place // count for place in range(count + 1)):
        at = slice(first * together, min(last * together, len(weight)))
        own = parameters
        if height > 0:  # else one scale for all rows
            of_scales = slice(at.start // height, at.stop // height)
            scale, zero = parameters.scale[of_scales], parameters.zero_point[of_scales]
            own = replace(parameters, scale=scale, zero_point=zero)
        found.append((at, own))
    return found


@dataclass(frozen=True)
class Solution:
    """The rounded weights of one :class:`Problem`, and what was found along with them."""

    weights: list[Tensor]
    """Values on the grid, float32, as :class:`Problem` had them."""
    loss: float
    """``½ tr(D H Dᵀ)``, D the difference from the target and H the damped Gram matrix."""
    dampening: float | None
    """The dampening that worked; ``None`` when nothing did and weights were rounded to nearest."""
    scales: list[Tensor] | None = None
    """What the scales became, ``[R_i, G]`` in their own dtype; ``None`` where they stay."""
    zero_points: list[Tensor] | None = None
    """The same of zero points."""
    is_idle: bool = False
    """Whether the input was zero in every token, which is why weights were rounded to nearest."""
    dead: int = 0
    """Columns whose input was zero in every token: their weights are rounded to nearest."""
    settled: list[Tensor] | None = None
    """What each weight would be, given all the other codes, float32; ``None`` where that was not
    wanted, and where weights were rounded to nearest."""


def solve(problems: Sequence[Problem], options: Options) -> list[Solution]:
    """Solve ``problems``; small ones of one kind are solved in one batch.

    Where the input of a column is zero in every token, the tokens do not determine its weights:
    they are rounded to nearest.
    """
    solutions: dict[int, Solution] = {}
    places = []
    for index, problem in enumerate(problems):
        dead = int(dead_columns(problem.gram_CC).sum())
        if dead == problem.shape[1]:
            solutions[index] = replace(_round_to_nearest(problem), is_idle=True, dead=dead)
        else:
            places.append(index)
    kinds = [problems[index].kind for index in places]
    columns = [problems[index].shape[1] for index in places]
    for batch in batch_by_kind(kinds, columns, BATCH_ELEMENTS, most=options.batch):
        indices = [places[number] for number in batch]
        found = _solve_batch([problems[index] for index in indices], options)
        solutions.update(zip(indices, found, strict=True))
    return [solutions[index] for index in range(len(problems))]


def solve_divided(
    problems: Sequence[Problem], options: Options, ranks: Ranks, what: str
) -> list[Solution]:
    """Solve ``problems``, of which all ranks have the same, each rank a part of the rows.

    Rows do not depend on each other, given the Gram matrix. Each rank factorizes it by itself.
    Problems with too few rows are solved whole by all ranks.

    Args:
        problems: the problems; their matrices are equal on all ranks.
        options: as for :func:`solve`.
        ranks: the ranks.
        what: the name of the rows, for errors.
    """
    parts = [one.parts(ranks.count) for one in problems]
    own = [part[ranks.rank] for part in parts if part]
    gathered = iter(_gathered_rows(own, solve(own, options), ranks, what))
    whole = iter(
        solve([one for one, part in zip(problems, parts, strict=True) if not part], options)
    )
    return [next(gathered if part else whole) for part in parts]


def _gathered_rows(
    problems: Sequence[Problem], found: Sequence[Solution], ranks: Ranks, what: str
) -> list[Solution]:
    """Join the rows that all ranks have solved, and their losses."""
    own: dict[str, Tensor] = {}
    for place, (problem, one) in enumerate(zip(problems, found, strict=True)):
        for number, values in enumerate(one.weights):
            parameters = problem.parameters[number]
            if one.scales is not None:
                parameters = replace(parameters, scale=one.scales[number])
                own[f"scale {place} {number}"] = one.scales[number]
            if one.zero_points is not None:
                parameters = replace(parameters, zero_point=one.zero_points[number])
                own[f"zero {place} {number}"] = one.zero_points[number]
            is_fine = problem.grid.bits >= FINE_BITS  # may be other values when rounded twice
            dtype = problem.weights[number].dtype
            rounded = values if is_fine else parameters.round(values).to(dtype)
            own[f"weight {place} {number}"] = rounded
    parts = [
        ranks.broadcast_from(rank, own if rank == ranks.rank else {}, what=what)
        for rank in range(ranks.count)
    ]
    losses = ranks.exchange([one.loss for one in found], what=f"losses of {what}")

    def joined(kind: str, place: int) -> list[Tensor]:
        keys = [f"{kind} {place} {number}" for number in range(len(problems[place].weights))]
        device = problems[place].gram_CC.device
        return [torch.cat([part[key].to(device) for part in parts]) for key in keys]

    return [
        replace(
            one,
            weights=joined("weight", place),
            scales=None if one.scales is None else joined("scale", place),
            zero_points=None if one.zero_points is None else joined("zero", place),
            loss=sum(each[place] for each in losses),
        )
        for place, one in enumerate(found)
    ]


def _solve_batch(problems: Sequence[Problem], options: Options) -> list[Solution]:
    def swept(some: Sequence[Problem]) -> list[Solution]:
        with one_thread(some[0].gram_CC.device):
            return _solve_by_sweep(some, options)

    return solve_batched_or_single(problems, swept, _round_to_nearest)


def _round_to_nearest(problem: Problem) -> Solution:
    """Round to nearest, for problems that cannot be factorized or whose inputs are all zero."""
    pairs = zip(problem.weights, problem.parameters, strict=True)
    weights = [parameters.round(weight).float() for weight, parameters in pairs]
    original_RC = torch.cat([weight.float() for weight in problem.weights])
    change_RC = torch.cat(weights) - original_RC
    loss = 0.5 * float(((change_RC @ problem.gram_CC) * change_RC).sum())
    return Solution(weights, loss, None)


def _solve_by_sweep(problems: Sequence[Problem], options: Options) -> list[Solution]:
    """Solve all ``problems`` at once; a single one without a batch dimension."""
    gram_CC = _stack([problem.gram_CC for problem in problems])
    weight_RC = _stack([stack_float32_rows(problem.weights) for problem in problems])
    kept_RC = _unpruned_mask(problems)
    if options.ridge is not None:
        weight_RC = _error_corrected_weight(problems, weight_RC, gram_CC, options.ridge)
    scales = _stacked_column_scales(problems)
    solve_rows = _RowSolver(problems, options, gram_CC)
    if problems[0].output_NBB:
        found = _solve_by_strips(problems, solve_rows, weight_RC, scales, kept_RC)
    else:
        found = solve_rows(weight_RC, scales, kept_RC)
    settled_RC = None
    if options.settles:
        settled_RC = conditional_optimum(
            weight_RC, found.rounded_RC, gram_CC, dampening=solve_rows.dampening
        )
        if kept_RC is not None:
            settled_RC.masked_fill_(~kept_RC, 0)
    changed = solve_rows.refits or problems[0].has_searched_scales
    scale_RG, zero_RG = (found.scales.scale_RG, found.scales.zero_RG) if changed else (None, None)
    parts = (found.rounded_RC, found.loss_R, scale_RG, zero_RG, settled_RC)
    each = [_unstacked(one, len(problems)) for one in parts]
    pairs = zip(problems, *each, strict=True)
    return [_solution(problem, solve_rows.dampening, *own) for problem, *own in pairs]


class _RowSolver:
    """Rounds rows on one Gram matrix, which is factorized for the first of them.

    Args:
        problems: one, or several of one kind in a batch.
        options: of the run.
        gram_CC: the Gram matrix of all of them.

    Attributes:
        refits: whether scales are fitted to the codes.
        dampening: the one that worked.
    """

    def __init__(self, problems: Sequence[Problem], options: Options, gram_CC: Tensor) -> None:
        self._problem, self._options, self._gram_CC = problems[0], options, gram_CC
        self._order_C = activation_order(gram_CC) if problems[0].ordered else None
        self._steps = _dampening_attempts(problems)
        self._factor: DampedFactor | None = None
        self.dampening = options.dampening
        bits = problems[0].grid.bits
        self._rounds = refinement_rounds(options.refinements, bits)
        # with codes of 8 bits the refitted scale differs by less than the resolution of bfloat16
        wanted = options.refit
        if wanted is None:
            wanted = bits < COARSE_BITS or not problems[0].has_searched_scales
        self.refits = wanted and all(one.has_own_scales for one in problems) and bits < FINE_BITS

    def factorize(self) -> None:
        """Keep the factor, for rows that are solved in several calls."""
        self._factor = factorize_with_rising_dampening(
            self._gram_CC, self._options.dampening, order_C=self._order_C, steps=self._steps
        )

    def __call__(self, target_RC: Tensor, scales: ColumnScales, kept_RC: Tensor | None) -> Refined:
        """Round rows; ``scales`` are those of the extremes where they are searched for."""
        problem, options, gram_CC = self._problem, self._options, self._gram_CC
        if problem.has_searched_scales:
            scales = _searched_scales(problem, target_RC, gram_CC, scales)
        (rounded_RC, loss_R), self.dampening = sweep_and_refine(
            target_RC,
            gram_CC,
            scales,
            problem.grid,
            dampening=options.dampening,
            rounds=min(self._rounds, 1),
            order_C=self._order_C,
            kept_RC=kept_RC,
            steps=self._steps,
            block=options.block_size,
            factor=self._factor,
        )
        return refine(
            Refined(rounded_RC, loss_R, scales),
            target_RC,
            gram_CC,
            problem.grid,
            dampening=self.dampening,
            rounds=self._rounds - 1,
            stored=problem.parameters[0].scale.dtype if self.refits else None,
            kept_RC=kept_RC,
            block=options.block_size,
        )


def _solve_by_strips(
    problems: Sequence[Problem],
    solve_rows: _RowSolver,
    weight_RC: Tensor,
    scales: ColumnScales,
    kept_RC: Tensor | None,
) -> Refined:
    """Solve strips of rows in turn, each of which makes up for the errors of those before."""
    hessians_NBB = [
        _stack(list(each)) for each in zip(*(one.output_NBB for one in problems), strict=True)
    ]
    rows = [len(weight) for weight in problems[0].weights]
    solve_rows.factorize()
    all_scales = scales._replace(scale_RG=scales.scale_RG.clone())
    if scales.zero_RG is not None:
        all_scales = all_scales._replace(zero_RG=scales.zero_RG.clone())
    rounded_RC, change_RC = torch.empty_like(weight_RC), torch.zeros_like(weight_RC)
    loss_R = weight_RC.new_zeros(weight_RC.shape[:-1])
    for strip in row_strips(hessians_NBB, rows):
        own_M = strip.rows_M
        found = solve_rows(
            strip.moved_target(weight_RC, change_RC),
            _scales_of(scales, own_M),
            None if kept_RC is None else take_rows(kept_RC, own_M),
        )
        put_rows_(rounded_RC, own_M, found.rounded_RC)
        put_rows_(change_RC, own_M, found.rounded_RC - take_rows(weight_RC, own_M))
        put_rows_(all_scales.scale_RG, own_M, found.scales.scale_RG)
        if all_scales.zero_RG is not None and found.scales.zero_RG is not None:
            put_rows_(all_scales.zero_RG, own_M, found.scales.zero_RG)
        loss_R.scatter_(-1, own_M, found.loss_R)
    return Refined(rounded_RC, loss_R, all_scales)


def _scales_of(scales: ColumnScales, rows_M: Tensor) -> ColumnScales:
    zero_RG = None if scales.zero_RG is None else take_rows(scales.zero_RG, rows_M)
    return scales._replace(scale_RG=take_rows(scales.scale_RG, rows_M), zero_RG=zero_RG)


def _searched_scales(
    problem: Problem, weight_RC: Tensor, gram_CC: Tensor, scales: ColumnScales
) -> ColumnScales:
    """Scales of the least weighted error of what is rounded, in the place of those of extremes."""
    curvature_C = fill_dead_columns(gram_CC.diagonal(dim1=-2, dim2=-1))
    stored = problem.parameters[0].scale.dtype
    groups = scales.scale_RG.shape[-1]
    scale_RG, zero_RG = weighted_scales(weight_RC, curvature_C, groups, problem.grid, stored)
    return scales._replace(scale_RG=scale_RG, zero_RG=zero_RG)


def _error_corrected_weight(
    problems: Sequence[Problem], weight_RC: Tensor, gram_CC: Tensor, ridge: float
) -> Tensor:
    """The weight to round instead of the original: it corrects the error of earlier layers."""
    missing = [one.missing_CR for one in problems if one.missing_CR is not None]
    cross = [one.cross_CC for one in problems if one.cross_CC is not None]
    if not missing and not cross:
        return weight_RC
    return corrected_weight(
        weight_RC,
        gram_CC,
        _stack(cross) if cross and not missing else None,
        ridge_for_tokens(ridge, gram_CC, [problem.tokens for problem in problems]),
        missing_CR=_stack(missing) if missing else None,
        steps=_dampening_attempts(problems),
    )


def has_searchable_scales(args: QuantizationArgs) -> bool:
    """Return True for integers below 8 bits with scales of each row."""
    grid = grid_of(args)
    by_row = args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)
    return grid.kind == "int" and grid.bits < FINE_BITS and by_row


def refinement_rounds(asked: int | None, bits: int) -> int:
    """Rounds of coordinate descent on a grid; by default two on grids of few bits.

    >>> [refinement_rounds(asked, bits) for asked, bits in ((None, 3), (None, 4), (1, 4), (1, 8))]
    [2, 0, 1, 0]
    """
    if bits >= FINE_BITS:
        return 0
    return asked if asked is not None else 2 * int(bits < COARSE_BITS)


FINE_BITS = 8
"""Bits from which the sweep leaves nothing to gain for a refinement, or other scales."""
COARSE_BITS = 4
"""Bits from which a refinement gains a fiftieth, and takes an eighth of the time; scales that were
searched for do not gain by being fitted again."""
PRUNED_SHARE = 0.05
"""Share of exact zeros from which on a weight was pruned, and keeps its zeros."""
_STEPS = 4
"""How often dampening is tried before giving up."""


def _dampening_attempts(problems: Sequence[Problem]) -> int:
    """The number of dampenings to try; one in a batch, so that no member affects the others."""
    return _STEPS if len(problems) == 1 else 1


def _unpruned_mask(problems: Sequence[Problem]) -> Tensor | None:
    """Bool mask of the weights that are not pruned, stacked; ``None`` if none is pruned.

    A weight counts as pruned from 5 percent of exact zeros on: rounding to 16 bits makes a few.
    """
    is_any, each = False, []
    for problem in problems:
        kept = []
        for weight in problem.weights:
            fewest = (1 - PRUNED_SHARE) * weight.numel()
            is_pruned = int(torch.count_nonzero(weight)) <= fewest
            is_any |= is_pruned
            kept.append(weight != 0 if is_pruned else torch.ones_like(weight, dtype=torch.bool))
        each.append(torch.cat(kept))
    return _stack(each) if is_any else None


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))


def _stacked_column_scales(problems: Sequence[Problem]) -> ColumnScales:
    """The scales of stacked rows, and of stacked problems."""
    stacked = []
    for problem in problems:
        pairs = zip(problem.weights, problem.parameters, strict=True)
        each = [parameters.columns(*weight.shape) for weight, parameters in pairs]
        groups_C = each[0].group_of_column_C
        if not all(torch.equal(one.group_of_column_C, groups_C) for one in each):
            groups_C = torch.arange(problem.shape[1], device=groups_C.device)
            each = [  # a scale per column
                ColumnScales(scale[:, own_C], None if zero is None else zero[:, own_C], groups_C)
                for scale, zero, own_C in each
            ]
        scale_RG = torch.cat([one.scale_RG for one in each])
        stacked.append(ColumnScales(scale_RG, _joined(torch.cat, each), groups_C))
    if len(stacked) == 1:
        return stacked[0]
    scale_RG = torch.stack([one.scale_RG for one in stacked])
    return ColumnScales(scale_RG, _joined(torch.stack, stacked), stacked[0].group_of_column_C)


def _joined(
    join: Callable[[list[Tensor]], Tensor], scales: Sequence[ColumnScales]
) -> Tensor | None:
    zeros = [one.zero_RG for one in scales if one.zero_RG is not None]
    return join(zeros) if zeros else None


def _unstacked(stacked: Any, count: int) -> Sequence[Any]:
    if stacked is None:
        return [None] * count
    return [stacked] if count == 1 else stacked


def _solution(
    problem: Problem,
    dampening: float,
    rounded_RC: Tensor,
    loss_R: Tensor,
    scale_RG: Tensor | None,
    zero_RG: Tensor | None,
    settled_RC: Tensor | None,
) -> Solution:
    rows = [len(weight) for weight in problem.weights]
    weights, scales, zeros = list(torch.split(rounded_RC, rows)), None, None
    parameters = problem.parameters
    if zero_RG is not None:
        zeros = [one.to(parameters[0].zero_point.dtype) for one in torch.split(zero_RG, rows)]
        both = zip(parameters, zeros, strict=True)
        parameters = [replace(one, zero_point=zero) for one, zero in both]
    if scale_RG is not None:
        stored = parameters[0].scale.dtype
        scales = [one.to(stored) for one in torch.split(scale_RG, rows)]
        pairs = zip(parameters, scales, strict=True)
        parameters = [replace(one, scale=scale) for one, scale in pairs]
    dead_C = dead_columns(problem.gram_CC)
    if bool(dead_C.any()):  # the sweep rounded them with the scales before a refit
        every = zip(weights, problem.weights, parameters, strict=True)
        weights = [
            found_RC.where(~dead_C, one.round(weight).float()) for found_RC, weight, one in every
        ]
    settled = None if settled_RC is None else list(torch.split(settled_RC, rows))
    loss, dead = float(loss_R.sum()), int(dead_C.sum())
    return Solution(weights, loss, dampening, scales, zeros, settled=settled, dead=dead)


# --------------------
# Cost of GPTQ, for C columns and R rows of all Linears with one input.
#
# step                              multiply-adds             further bytes
# second moments                    36/64 C² a token          4 C²
# cross products, twin streams      C² a token                4 C²
# output residuals, for few rows    2 R C a token             4 R C and a copy
# correction, twin streams          C³/3 + 2 R C², or R C²    8 C² + 11 R C
# factorization                     C³/3                      4 C² + 4 P² + 4 R C, panels of P
# sweep                             R C²/2                    4 C² + 12 R C + 4 P (R + C)
# refinement, a round               R C²                      4 C² + 33 R C / 2
# transposing back                  none                      12 or 16 R C, 8 C for a thread's rows
# refit of scales, on accelerators  R C²                      16 R C + 20 R g, groups of g columns
#
# The moments stay while solving; of the further bytes the largest term counts.

_FLOAT = 4
_VISITS_OF_SWEEP = 24
_VISITS_OF_REFINEMENT = 26


def gptq_cost(
    weights: Sequence[Tensor],
    data: DataSize,
    *,
    twin: bool,
    refinements: int,
    group: int = 0,
    batch: int | None = None,
    answered: bool = False,
) -> Cost:
    """The cost of solving Linears with one input.

    Args:
        weights: each ``[R_i, C]``; only shapes and dtypes are used.
        data: size of the calibration data.
        twin: with the inputs of the original model.
        refinements: rounds of coordinate descent.
        group: columns that share a scale; 0 for all.
        batch: problems of one shape solved together; by default as many as are small.
        answered: whether output residuals are accumulated where that costs less.
    """
    if not weights:
        return Cost()
    columns = weights[0].shape[-1]
    elements = sum(weight.numel() for weight in weights)
    rows, itemsize, square = elements // columns, weights[0].element_size(), columns**2
    solve = square * columns // 3 + elements * columns // 2
    solve += refinements * elements * columns
    cross = compared = summed = 0
    if twin and answered and prefers_output_residual(rows, columns, weights[0].dtype):
        cross, compared, summed = 2 * elements, (_FLOAT + itemsize) * elements, _FLOAT * elements
        solve += square * columns // 3 + elements * columns
    elif twin:
        cross, compared, summed = square, _FLOAT * square, _FLOAT * square
        solve += square * columns // 3 + 2 * elements * columns
    buffered = data.buffered * columns * itemsize
    panel = min(columns, PANEL)
    transposed = columns * min(rows, SPAN * torch.get_num_threads())
    largest = max(
        4 * square + 4 * panel**2 + 4 * elements,
        8 * square + 11 * elements if twin else 0,
        4 * square + 12 * elements + 4 * panel * (rows + columns),
        (4 * square + 33 * elements // 2) if refinements else 0,
        (16 if refinements else 12) * elements + 8 * transposed,
        16 * elements + 20 * rows * (min(group, columns) or columns) if data.on_device else 0,
    )
    visits = elements * (_VISITS_OF_SWEEP + refinements * _VISITS_OF_REFINEMENT)
    return Cost(
        flops=data.tokens * (square * 36 // 64 + cross) + solve + ELEMENTWISE * visits,
        held_bytes=_FLOAT * square + compared + (1 + twin) * buffered,
        peak_bytes=min(data.alike, batch or max(1, BATCH_ELEMENTS // square)) * largest,
        summed_bytes=triangle_bytes(columns) + summed,
    )
