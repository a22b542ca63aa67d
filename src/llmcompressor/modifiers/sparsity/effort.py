# SPDX-License-Identifier: Apache-2.0
r"""What SparseGPT takes, by counting: C columns, R rows of all Linears with one input, T tokens.

=====================================  =======================================  ==================
step                                   multiply-adds                            further bytes
=====================================  =======================================  ==================
second moments                         T C² · 36/64 (block rows of a triangle)  4 C²
cross products (twin streams)          T C²                                     4 C²
correction (twin streams)              C³/3 + 2 R C²                            less than below
a round of splitting                   C³/3 + R C²                              8 C² + 4 P² + 25 R C
the fit at the end                     6 R C²                                   4 C² + 21 R C
the sweep, where there are no rounds   5 C³/6 + R C²/2                          8 C² + 13 R C
=====================================  =======================================  ==================

P is the width of a panel of the factorization, or C if that is less.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmcompressor.modifiers.modifier import Effort
from llmcompressor.numerics.cholesky import PANEL
from llmcompressor.numerics.gram import CHUNK_TOKENS

__all__ = ["effort_of"]

_FLOAT = 4
_VISITS_OF_SWEEP = 24
_VISITS_OF_ROUND = 30


def effort_of(shapes: Sequence[tuple[int, int]], *, twin: bool, refinements: int) -> Effort:
    """What it takes to prune Linears with one input.

    Args:
        shapes: rows and columns of each.
        twin: with the inputs of the original model.
        refinements: rounds of splitting.
    """
    if not shapes:
        return Effort()
    columns = max(shape[1] for shape in shapes)
    elements = sum(rows * width for rows, width in shapes)
    square, streams = columns**2, 2 if twin else 1
    cube, products = square * columns, elements * columns
    if refinements:
        solve = refinements * (cube // 3 + products) + 6 * products
    else:
        solve = cube * 5 // 6 + products // 2
    if twin:
        solve += cube // 3 + 2 * products
    fitting = 8 * square + 4 * min(columns, PANEL) ** 2 + 25 * elements
    return Effort(
        gram=square * 36 // 64,
        cross=square if twin else 0,
        solve=solve,
        visits=elements * (refinements * _VISITS_OF_ROUND or _VISITS_OF_SWEEP),
        statistics=_FLOAT * (square * streams + streams * CHUNK_TOKENS * columns),
        workspace=fitting if refinements else 8 * square + 13 * elements,
    )
