# SPDX-License-Identifier: Apache-2.0
"""What AWQ takes, by counting: T tokens, C columns, R rows of all Linears with one input.

=================  =======================================  ===============================
step               multiply-adds                            bytes
=================  =======================================  ===============================
second moments     T C² · 36/64 (block rows of a triangle)  4 C²
one candidate      R C (C + W) / 2, blocks of W columns     4 C (C + W) / 2; 16 R C elsewhere
=================  =======================================  ===============================
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from llmcompressor.modifiers.modifier import Effort
from llmcompressor.numerics.gram import CHUNK_TOKENS
from llmcompressor.numerics.quadratic import WIDTH

__all__ = ["effort_of"]

_FLOAT = 4
_VISITS = 8
"""Passes over a weight for one candidate: scaled, extremes, rounded, compared."""


def effort_of(weights: Sequence[Tensor], *, points: int) -> Effort:
    """What it takes to find the scale of Linears with one input.

    Args:
        weights: each ``[R_i, C]``; only their forms are looked at.
        points: candidates that are tried.
    """
    if not weights:
        return Effort()
    columns = weights[0].shape[-1]
    elements = sum(weight.numel() for weight in weights)
    form = columns * (columns + WIDTH) // 2
    return Effort(
        gram=columns**2 * 36 // 64,
        solve=(points + 1) * elements * (columns + WIDTH) // 2,
        visits=(points + 1) * _VISITS * elements,
        statistics=_FLOAT * columns**2 + CHUNK_TOKENS * columns * weights[0].element_size(),
        workspace=_FLOAT * max(form, 4 * max(weight.numel() for weight in weights)),
    )
