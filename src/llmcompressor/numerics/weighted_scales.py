# SPDX-License-Identifier: Apache-2.0
r"""Scales with which the rounding error of a weight, weighted by the Hessian's diagonal, is least.

For the values w_c of a row that share a scale, rounded by Q_s,

.. math:: \min_s \sum_c H_{cc} \bigl(w_c - Q_s(w_c)\bigr)^2 .

That is the output error of rounding to nearest, of inputs that do not correlate. A sweep which
begins from these scales loses less than one from the extremes: with few bits most of the range of
a group is for its largest value.

The ranges tried are fractions of the extremes: five of them first, then two steps above and below
the best, the second half as long. In units of the scale, with t = w / s + z, the error of a value
is ``t − round(clamp(t))``.

Shapes: R rows, C columns, G groups of K = C / G consecutive columns; leading batch dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.range_search import BestSoFar
from llmcompressor.numerics.scales import scales_from_range
from llmcompressor.runtime.threads import parallel_spans, wide_span

FRACTIONS = (1.0, 0.85, 0.7, 0.55, 0.4)
"""Parts of the extremes that are tried for all cells: at 2 bits the best is about a half."""
STEPS = (0.075, 0.0375)
"""By how much parts above and below the best of them differ from it, one after the other."""
_CHUNK_ELEMENTS, _LARGE_CHUNK = 1 << 17, 1 << 24
"""Elements that all candidates are tried on at once: they fit a processor's cache; elsewhere."""


def weighted_scales(
    weight_RC: Tensor, curvature_C: Tensor, groups: int, grid: Grid, stored: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The scale, and on asymmetric grids the zero point, of each row and group.

    Args:
        weight_RC: the values to be rounded, float32 ``[..., R, C]``.
        curvature_C: the diagonal of the Hessian, not negative, ``[..., C]``.
        groups: G, which divides C.
        grid: an integer grid.
        stored: the dtype that scales are rounded to.

    Returns:
        Scales, float32 ``[..., R, G]``, with the precision of ``stored``, and zero points, float32
        of the same shape; ``None`` on symmetric grids.

    A few large values are cut off if the others gain more:

    >>> row_1C = torch.tensor([[*[0.35, -0.35] * 30, 1.0]])
    >>> scale, _ = weighted_scales(row_1C, torch.ones(61), 1, Grid("int", 2), torch.float32)
    >>> bool(scale < 0.5)
    True
    """
    weight_RGK = weight_RC.unflatten(-1, (groups, -1))  # type: ignore[no-untyped-call]
    importance_1GK = curvature_C.unflatten(-1, (groups, -1)).unsqueeze(-3)  # type: ignore[no-untyped-call]
    scale_RG = weight_RC.new_empty(weight_RGK.shape[:-1], dtype=torch.float32)
    zero_RG = torch.empty_like(scale_RG)

    def search(rows: slice) -> None:
        cells = _Cells(weight_RGK[..., rows, :, :], importance_1GK, grid, stored)
        scale_RG[..., rows, :], zero_RG[..., rows, :] = cells.search()

    rows = weight_RC.shape[-2]
    parallel_spans(search, rows, weight_RC.device, width=wide_span(rows))
    return scale_RG, None if grid.symmetric else zero_RG


class _Cells:
    """Some rows of a weight, and the search for their scales."""

    def __init__(
        self, weight_RGK: Tensor, importance_1GK: Tensor, grid: Grid, stored: torch.dtype
    ) -> None:
        self._weight_RGK, self._importance_1GK = weight_RGK, importance_1GK
        self._grid, self._stored = grid, stored
        self._lowest_RG, self._highest_RG = weight_RGK.amin(-1), weight_RGK.amax(-1)
        rows = weight_RGK.shape[-3]
        width = weight_RGK.numel() // max(rows, 1)
        limit = _CHUNK_ELEMENTS if weight_RGK.device.type == "cpu" else _LARGE_CHUNK
        height = min(max(limit // max(width, 1), 1), rows)
        self._chunks = [slice(lo, min(lo + height, rows)) for lo in range(0, rows, height)]
        self._scratch = [torch.empty_like(weight_RGK[..., :height, :, :]) for _ in range(2)]

    def search(self) -> tuple[Tensor, Tensor]:
        """The scale and zero point of each cell, float32 ``[..., R, G]``."""
        one_RG = torch.ones_like(self._lowest_RG)
        best = BestSoFar(
            torch.full_like(one_RG, torch.inf), one_RG, one_RG, torch.zeros_like(one_RG)
        )
        self._try([fraction * one_RG for fraction in FRACTIONS], best)
        for step in STEPS:
            share_RG, *_ = best.candidate_S
            self._try([(share_RG + way * step).clamp(max=1.0) for way in (1, -1)], best)
        _, scale_RG, zero_RG = best.candidate_S
        return scale_RG, zero_RG

    def _try(self, shares: Sequence[Tensor], best: BestSoFar) -> None:
        """Compare parts of the extremes with the best so far: a part, its scale and zero point."""
        share_FRG = torch.stack(list(shares))
        ends = share_FRG * self._lowest_RG, share_FRG * self._highest_RG
        scale_FRG, zero_FRG = scales_from_range(*ends, self._grid, stored_in=self._stored)
        scale_FRG, zero_FRG = scale_FRG.float(), zero_FRG.float()
        error_FRG = self._errors(scale_FRG, None if self._grid.symmetric else zero_FRG)
        for each in zip(error_FRG, share_FRG, scale_FRG, zero_FRG, strict=True):
            best.take(*each)

    def _errors(self, scale_FRG: Tensor, zero_FRG: Tensor | None) -> Tensor:
        """Sums of the weighted squares of rounding errors, float32 ``[F, ..., R, G]``."""
        inverse_FRG1 = scale_FRG.reciprocal().unsqueeze(-1)
        error_FRG = torch.empty_like(scale_FRG)
        least, greatest = self._grid.qmin, self._grid.qmax
        for rows in self._chunks:
            values_HGK = self._weight_RGK[..., rows, :, :]
            quotient_HGK, lost_HGK = (
                one[..., : rows.stop - rows.start, :, :] for one in self._scratch
            )
            for f in range(len(scale_FRG)):
                torch.mul(values_HGK, inverse_FRG1[f][..., rows, :, :], out=quotient_HGK)
                if zero_FRG is not None:
                    quotient_HGK.add_(zero_FRG[f][..., rows, :, None])
                torch.clamp(quotient_HGK, least, greatest, out=lost_HGK)
                lost_HGK.round_().sub_(quotient_HGK)
                lost_HGK.mul_(lost_HGK).mul_(self._importance_1GK)
                torch.sum(lost_HGK, -1, out=error_FRG[f][..., rows, :])
        return error_FRG.mul_(scale_FRG).mul_(scale_FRG)
