# SPDX-License-Identifier: Apache-2.0
r"""Half-quadratic quantization (HQQ): scales and zero points with a sparse rounding error.

Badri and Shaji, *Half-Quadratic Quantization* (2023). The values w of a cell are rounded to
w' = (q - z) s. The objective is the sum of :math:`\varphi(e) = |e|^p` with p below 1 of the errors
e = (w - w') / s, in steps of the grid: a few values may have large errors if that reduces the
errors of many others. It is split by a second variable h that should equal e,

.. math:: \min_{s, z, h}\; \sum |h|^p + \tfrac{\beta}{2} (h - e)^2 ,

and each variable in turn has a closed form, while β grows by κ in each round::

    q = round(clamp(w / s + z))
    h = sign(e) max(|e| - |e|^(p-1) / beta, 0)          (generalized soft threshold)
    z = mean(q - (w / s - h))                           (asymmetric grids)
    s = sum(s (w / s - h) (q - z)) / sum((q - z)^2)     (least squares)

The paper updates z alone and stores it as a float. Formats with integer zero points leave such a z
only the choice of the clamped end, so z is rounded and s is updated too; on symmetric grids only s
is. Each cell keeps the best of all rounds, including the start.

Shapes: S cells (one scale each), N elements of a cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.errors import InputError
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.range_search import BestSoFar, power_

CHUNK_ELEMENTS = 1 << 18
"""Elements that stay in a cache while all rounds are made on them."""


@dataclass(frozen=True)
class HalfQuadratic:
    """Options of the alternating optimization.

    Args:
        norm: p, above 0 and at most 1.
        beta: β of the first round, in steps of the grid to the power 2 - p.
        kappa: factor on β after each round.
        iterations: number of rounds.
    """

    norm: float = 0.7
    beta: float = 1.0
    kappa: float = 1.01
    iterations: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.norm <= 1:
            raise InputError(f"The norm is {self.norm}.", "Give a number above 0, at most 1.")
        if not self.beta > 0:
            raise InputError(f"beta is {self.beta}.", "Give a number above 0.")
        if not self.kappa >= 1:
            raise InputError(f"kappa is {self.kappa}.", "Give 1 or more.")
        if self.iterations < 0:
            raise InputError(f"There are {self.iterations} iterations.", "Give 0 or more.")


def lp_error(
    values_SN: Tensor, scale_S: Tensor, zero_S: Tensor | None, grid: Grid, norm: float
) -> Tensor:
    """Sum of abs(w - w')^norm of each cell, float32 [S], for w' as loaders decode it.

    >>> lp_error(torch.tensor([[0.0, 1.25]]), torch.ones(1), None, Grid("int", 4), 1.0)
    tensor([0.2500])
    """
    zero = None if zero_S is None else zero_S.unsqueeze(-1)
    rounded_SN = grid.fake_quantize(values_SN, scale_S.unsqueeze(-1), zero)
    error_SN = rounded_SN.float().sub_(values_SN.float()).abs_()
    return power_(error_SN, norm).sum(-1)


def refine_cells(
    values_SN: Tensor,
    scale_S: Tensor,
    zero_S: Tensor | None,
    grid: Grid,
    search: HalfQuadratic,
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points with an :func:`lp_error` that is larger than before for no cell.

    Args:
        values_SN: the elements of each cell, floating dtype; zeros may pad them.
        scale_S: initial scales, floating dtype, positive.
        zero_S: initial zero points, any integer dtype; ``None`` on symmetric grids.
        grid: an integer grid.
        search: options of the optimization.

    Returns:
        New tensors in the shapes and dtypes of ``scale_S`` and ``zero_S``.
    """
    if grid.kind != "int" or grid.symmetric != (zero_S is None):
        raise InputError(
            "Half-quadratic quantization is for integers, with zero points where the grid is "
            "asymmetric.",
            "Give an integer grid that fits the zero points.",
        )
    found = [one.clone() for one in (scale_S, zero_S) if one is not None]
    height = max(1, CHUNK_ELEMENTS // max(1, values_SN.shape[1]))
    for top in range(0, len(values_SN), height):
        rows = slice(top, top + height)
        best = _alternate(values_SN[rows], [one[rows] for one in found], grid, search)
        for one, better_S in zip(found, best.candidate_S, strict=True):
            one[rows] = better_S
    return found[0], None if zero_S is None else found[1]


def _alternate(
    values_SN: Tensor, start_S: list[Tensor], grid: Grid, search: HalfQuadratic
) -> BestSoFar:
    """The best parameters of all rounds; each starts from what the last one would store."""
    exact_SN = values_SN.float()
    scale_S, zero_S = start_S[0], start_S[1] if len(start_S) > 1 else None
    best = BestSoFar(lp_error(values_SN, scale_S, zero_S, grid, search.norm), *start_S)
    beta = search.beta
    for _ in range(search.iterations):
        step_S1 = scale_S.float().unsqueeze(-1)
        wide_SN = exact_SN / step_S1
        zero_S1 = 0.0 if zero_S is None else zero_S.float().unsqueeze(-1)
        code_SN = (wide_SN + zero_S1).clamp_(grid.qmin, grid.qmax).round_()
        error_SN = wide_SN - (code_SN - zero_S1)
        size_SN = error_SN.abs()
        # infinite at 0: h is 0 there
        threshold_SN = power_(size_SN.clone(), search.norm - 1).div_(beta)
        target_SN = wide_SN - error_SN.sign() * (size_SN - threshold_SN).clamp_(min=0)
        if zero_S is not None:
            found_S = (code_SN - target_SN).mean(-1).round_().clamp_(grid.qmin, grid.qmax)
            zero_S = found_S.to(zero_S.dtype)
            code_SN -= zero_S.float().unsqueeze(-1)
        # a cell of zeros alone: its scale stays
        factor_S = (target_SN * code_SN).sum(-1) / code_SN.square().sum(-1)
        moved_S = (step_S1.squeeze(-1) * factor_S).to(scale_S.dtype)
        scale_S = torch.where(moved_S.isfinite() & (moved_S > 0), moved_S, scale_S)
        candidate_S = [scale_S] if zero_S is None else [scale_S, zero_S]
        best.take(lp_error(values_SN, scale_S, zero_S, grid, search.norm), *candidate_S)
        beta *= search.kappa
    return best
