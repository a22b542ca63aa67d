# SPDX-License-Identifier: Apache-2.0
r"""Scales with which the rounding error of a weight, weighted by the Hessian's diagonal, is least.

For the values w_c of a row that share a scale, rounded by Q_s,

.. math:: \min_s \sum_c H_{cc} \bigl(w_c - Q_s(w_c)\bigr)^2 .

That is the output error of rounding to nearest, of inputs that do not correlate. A sweep which
begins from these scales loses less than one from the extremes: with few bits most of the range of
a group is for its largest value.

Shapes: R rows, C columns, G groups of K = C / G consecutive columns; leading batch dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.range_search import ShrinkSearch, search_range
from llmcompressor.numerics.scales import scales_from_range
from llmcompressor.runtime.threads import parallel_spans

_SEARCH = ShrinkSearch(maxshrink=0.7, patience=0, resolution=20, norm=2.0)
"""Ranges down to a third of the extremes: at 2 bits the best is about a half."""


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
    shape = *weight_RC.shape[:-1], groups
    scale_RG = torch.empty(shape, dtype=torch.float32, device=weight_RC.device)
    zero_RG = None if grid.symmetric else torch.empty_like(scale_RG)
    width = weight_RC.shape[-1] // groups
    importance_PK = curvature_C.reshape(-1, width)
    batches = curvature_C.numel() // curvature_C.shape[-1]

    def search(rows: slice) -> None:
        # the group changes first, then the problem of a batch, then the row: as importance repeats
        part_BRC = weight_RC[..., rows, :].reshape(batches, -1, weight_RC.shape[-1])
        cells_NK = part_BRC.transpose(0, 1).reshape(-1, width)
        ends = search_range(cells_NK, grid, _SEARCH, importance_PN=importance_PK)
        found = scales_from_range(*ends, grid, stored_in=stored)
        for target_RG, found_N in zip((scale_RG, zero_RG), found, strict=True):
            if target_RG is not None:
                part_RG = target_RG[..., rows, :]
                found_BRG = found_N.view(-1, batches, groups).transpose(0, 1)
                part_RG.copy_(found_BRG.reshape(part_RG.shape))

    parallel_spans(search, weight_RC.shape[-2], weight_RC.device)
    return scale_RG, zero_RG
