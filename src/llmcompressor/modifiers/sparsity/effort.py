# SPDX-License-Identifier: Apache-2.0
r"""What SparseGPT takes, by counting: C columns, R rows of all Linears with one input, T tokens.

=====================================  =======================================  ==================
step                                   multiply-adds                            further bytes
=====================================  =======================================  ==================
second moments                         T C² · 36/64 (block rows of a triangle)  4 C²
cross products (twin streams)          T C²                                     4 C²
correction (twin streams)              C³/3 + 2 R C²                            less than below
the goal of splitting                  R C²                                     4 C² + 8 R C
a factor, for two rounds               C³/3                                     16 C² + 8 R C
a round, choosing in groups            R C²                                     16 C² + 18RC + 16SC
a round, choosing anywhere             R C²                                     16 C² + 28RC + 20E
the fit at the end                     5 R C²                                   less than that
the sweep, where there are no rounds   5 C³/6 + R C²/2                          8 C² + 13 R C
=====================================  =======================================  ==================

S are the rows that all threads together work on; E is R C, and 2¹⁹ at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcompressor.modifiers.modifier import Effort
from llmcompressor.numerics.batching import BATCH_ELEMENTS
from llmcompressor.numerics.gram import CHUNK_TOKENS
from llmcompressor.threads import SPAN

__all__ = ["effort_of"]

_FLOAT = 4
_VISITS_OF_SWEEP = 24
_VISITS_OF_ROUND = 24
_CHOSEN_AT_ONCE = 2**19


def effort_of(matrices: Sequence[Tensor], *, twin: bool, refinements: int, grouped: bool) -> Effort:
    """What it takes to prune Linears with one input.

    Args:
        matrices: each ``[R_i, C]``; only their forms are looked at.
        twin: with the inputs of the original model.
        refinements: rounds of splitting.
        grouped: whether weights are compared in small groups only.
    """
    if not matrices:
        return Effort()
    columns = max(matrix.shape[1] for matrix in matrices)
    elements = sum(matrix.numel() for matrix in matrices)
    square, streams = columns**2, 2 if twin else 1
    cube, products = square * columns, elements * columns
    if refinements:
        solve = -(-refinements // 2) * cube // 3 + (refinements + 5) * products
    else:
        solve = cube * 5 // 6 + products // 2
    if twin:
        solve += cube // 3 + 2 * products
    if grouped:
        at_once = columns * min(elements // columns, SPAN * torch.get_num_threads())
        fitting = 16 * square + 18 * elements + 16 * at_once
    else:
        fitting = 16 * square + 28 * elements + 20 * min(elements, _CHOSEN_AT_ONCE)
    return Effort(
        gram=square * 36 // 64,
        cross=square if twin else 0,
        solve=solve,
        visits=elements * (refinements * _VISITS_OF_ROUND or _VISITS_OF_SWEEP),
        statistics=_FLOAT * square * streams,
        buffered=streams * CHUNK_TOKENS * columns * matrices[0].element_size(),
        workspace=fitting if refinements else 8 * square + 13 * elements,
        at_once=max(1, BATCH_ELEMENTS // square),
    )
