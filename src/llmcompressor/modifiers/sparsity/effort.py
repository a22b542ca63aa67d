# SPDX-License-Identifier: Apache-2.0
r"""Cost model of SparseGPT: C columns, R rows of all Linears with one input, T tokens.

=====================================  =======================================  ==================
step                                   multiply-adds                            further bytes
=====================================  =======================================  ==================
second moments                         T C² · 36/64 (block rows of a triangle)  4 C²
cross products (twin streams)          T C²                                     4 C²
correction (twin streams)              C³/3 + 2 R C²                            less than below
a factor, for three rounds             C³/3                                     20 C² + 12 R C
a round, choosing in groups            R C²                                     12 C² + 14RC + 16SC
a round, choosing anywhere             R C²                                     16 C² + 21RC + 20E
the fit at the end                     3 R C²                                   4 C² + 21 R C
the sweep, where there are no rounds   C³/3 + R C²/2                            4 C² + 17 R C
the same, choosing anywhere                                                     4C² + 13RC + 28PR
=====================================  =======================================  ==================

S are the rows that all threads together work on; E is R C, and 2¹⁹ at most; P are the columns of a
block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcompressor.modifiers.demands import Effort
from llmcompressor.numerics.batching import BATCH_ELEMENTS
from llmcompressor.numerics.gram import CHUNK_TOKENS
from llmcompressor.numerics.sparse_fit import REFIT_STEPS, ROUNDS_PER_FACTOR
from llmcompressor.threads import SPAN

__all__ = ["effort_of"]

_FLOAT = 4
_VISITS_OF_SWEEP = 24
_VISITS_OF_ROUND = 24
_CHOSEN_AT_ONCE = 2**19
_BLOCK = 128


def effort_of(matrices: Sequence[Tensor], *, twin: bool, refinements: int, grouped: bool) -> Effort:
    """Cost of pruning Linears with one input.

    Args:
        matrices: each ``[R_i, C]``; only their shapes matter.
        twin: also use the inputs of the original model.
        refinements: rounds of splitting.
        grouped: weights are compared within N:M groups only.
    """
    if not matrices:
        return Effort()
    columns = max(matrix.shape[1] for matrix in matrices)
    elements = sum(matrix.numel() for matrix in matrices)
    square, streams = columns**2, 2 if twin else 1
    cube, products = square * columns, elements * columns
    if refinements:
        factors = -(-refinements // ROUNDS_PER_FACTOR)
        solve = factors * cube // 3 + (refinements + 1 + REFIT_STEPS) * products
    else:
        solve = cube // 3 + products // 2
    if twin:
        solve += cube // 3 + 2 * products
    return Effort(
        gram=square * 36 // 64,
        cross=square if twin else 0,
        solve=solve,
        visits=elements * (refinements * _VISITS_OF_ROUND or _VISITS_OF_SWEEP),
        statistics=_FLOAT * square * streams,
        buffered=streams * CHUNK_TOKENS * columns * matrices[0].element_size(),
        workspace=_workspace(columns, elements, refinements, grouped=grouped),
        at_once=max(1, BATCH_ELEMENTS // square),
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
    return max(20 * square + 12 * elements, in_round, 4 * square + 21 * elements)
