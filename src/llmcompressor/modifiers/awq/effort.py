# SPDX-License-Identifier: Apache-2.0
"""What AWQ takes, by counting: T tokens, C columns, R rows of all Linears with one input.

=================  =======================================  ===============================
step               multiply-adds                            bytes
=================  =======================================  ===============================
second moments     T C² · 36/64 (block rows of a triangle)  4 C²
one candidate      R C (C + W) / 2, blocks of W columns     4 C (C + W) / 2; 16 R C elsewhere
clipping, a sweep  R C (C + (K + 1) g), groups of g         2 of the weight, 4 C² and, of the
                   columns, K attempts                      rows at once, 12 C + 20 K g each
=================  =======================================  ===============================

Before rows are clipped, float32 copies of the weight (8 R C) or of the moments (8 C²) are scaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcompressor.modifiers.modifier import Effort
from llmcompressor.numerics.awq import CLIP_ATTEMPTS, CLIPPED_ROWS
from llmcompressor.numerics.gram import CHUNK_TOKENS
from llmcompressor.numerics.quadratic import WIDTH

__all__ = ["effort_of"]

_FLOAT = 4
_VISITS = 8
"""Passes over a weight for one candidate: scaled, extremes, rounded, compared."""


def effort_of(
    weights: Sequence[Tensor], *, points: int, clipped: Sequence[Tensor] = (), group: int = 0
) -> Effort:
    """What it takes to find the scale of Linears with one input, and the ends of their groups.

    Args:
        weights: that the scale is judged on, each ``[R_i, C]``; only their forms are looked at.
        points: candidates that are tried.
        clipped: those that are clipped.
        group: columns that share a scale in them; 0 for all.
    """
    every = [*weights, *clipped]
    if not every:
        return Effort()
    columns = every[0].shape[-1]
    searched = _search(weights, columns, points)
    ends = _clipping(clipped, columns, min(group, columns) or columns)
    return Effort(
        gram=columns**2 * 36 // 64,
        solve=searched.solve + ends.solve,
        visits=searched.visits + ends.visits,
        statistics=_FLOAT * columns**2 + CHUNK_TOKENS * columns * every[0].element_size(),
        workspace=max(searched.workspace, ends.workspace),
    )


def _search(weights: Sequence[Tensor], columns: int, points: int) -> Effort:
    if not weights:
        return Effort()
    elements = sum(weight.numel() for weight in weights)
    form = columns * (columns + WIDTH) // 2
    return Effort(
        solve=(points + 1) * elements * (columns + WIDTH) // 2,
        visits=(points + 1) * _VISITS * elements,
        workspace=_FLOAT * max(form, 4 * max(weight.numel() for weight in weights)),
    )


def _clipping(weights: Sequence[Tensor], columns: int, group: int) -> Effort:
    if not weights:
        return Effort()
    elements = sum(weight.numel() for weight in weights)
    tries, square = sum(CLIP_ATTEMPTS), columns**2
    rows = min(elements // columns, CLIPPED_ROWS * torch.get_num_threads())
    at_once = rows * (12 * columns + 20 * max(CLIP_ATTEMPTS) * group)
    return Effort(
        solve=elements * (len(CLIP_ATTEMPTS) * columns + (tries + len(CLIP_ATTEMPTS)) * group),
        visits=tries * _VISITS * elements,
        workspace=elements * weights[0].element_size()
        + max(8 * elements, 8 * square, 4 * square + 8 * elements // group + at_once),
    )
