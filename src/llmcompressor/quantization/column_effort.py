# SPDX-License-Identifier: Apache-2.0
r"""Cost model of GPTQ, for C columns, R rows of all Linears with one input, and T tokens.

=====================================  =======================================  =================
step                                   multiply-adds                            further bytes
=====================================  =======================================  =================
second moments                         T C² · 36/64 (block rows of a triangle)  4 C²
cross products (twin streams)          T C²                                     4 C²
or output residuals, where R ≤ C / 2   2 T R C                                  4 R C and a copy
correction (twin streams)              C³/3 + 2 R C², or C³/3 + R C²            8 C² + 11 R C
factorization                          C³/3                                     4 C² + 4 P² + 4 R C
sweep                                  R C²/2                                   4C²+12RC + 4P(R + C)
refinement                             R C² per round                           4 C² + 33 R C / 2
transposing back                       none                                     12 or 16 RC + 8SC
refit of scales, on an accelerator     R C² of groups of g columns              16 R C + 20 R g
=====================================  =======================================  =================

The second moments stay allocated while solving; of the further bytes the largest term counts. P is
the width of a panel of the factorization, or C if that is less; S are the rows that all threads
together transpose at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcompressor.modifiers.demands import Effort
from llmcompressor.numerics.batching import BATCH_ELEMENTS
from llmcompressor.numerics.cholesky import PANEL
from llmcompressor.numerics.gram import CHUNK_TOKENS
from llmcompressor.observers.input_statistics import counts_missing
from llmcompressor.threads import SPAN

__all__ = ["effort_of"]

_FLOAT = 4
_VISITS_OF_SWEEP = 24
_VISITS_OF_REFINEMENT = 26


def effort_of(
    weights: Sequence[Tensor],
    *,
    twin: bool,
    refinements: int,
    group: int = 0,
    batch: int | None = None,
    answered: bool = False,
) -> Effort:
    """The cost of solving Linears with one input.

    Args:
        weights: each ``[R_i, C]``; only shapes and dtypes are used.
        twin: with the inputs of the original model.
        refinements: rounds of coordinate descent.
        group: columns that share a scale; 0 for all.
        batch: problems of one shape solved together; by default as many as are small.
        answered: whether output residuals are accumulated where that costs less.
    """
    if not weights:
        return Effort()
    columns = weights[0].shape[-1]
    elements = sum(weight.numel() for weight in weights)
    square, streams = columns**2, 2 if twin else 1
    solve = square * columns // 3 + elements * columns // 2
    solve += refinements * elements * columns
    rows, itemsize = elements // columns, weights[0].element_size()
    cross = compared = 0
    if twin and answered and counts_missing(rows, columns, weights[0].dtype):
        cross, compared = 2 * elements, (_FLOAT + itemsize) * elements
        solve += square * columns // 3 + elements * columns
    elif twin:
        cross, compared = square, _FLOAT * square
        solve += square * columns // 3 + 2 * elements * columns
    buffered = streams * CHUNK_TOKENS * columns * itemsize
    turned = columns * min(rows, SPAN * torch.get_num_threads())
    panel = min(columns, PANEL)
    largest = max(
        4 * square + 4 * panel**2 + 4 * elements,
        8 * square + 11 * elements if twin else 0,
        4 * square + 12 * elements + 4 * panel * (rows + columns),
        (4 * square + 33 * elements // 2) if refinements else 0,
        (16 if refinements else 12) * elements + 8 * turned,
    )
    return Effort(
        gram=square * 36 // 64,
        cross=cross,
        solve=solve,
        visits=elements * (_VISITS_OF_SWEEP + refinements * _VISITS_OF_REFINEMENT),
        statistics=_FLOAT * square + compared,
        buffered=buffered,
        workspace=largest,
        on_device=max(largest, 16 * elements + 20 * rows * (min(group, columns) or columns)),
        at_once=batch or max(1, BATCH_ELEMENTS // square),
    )
