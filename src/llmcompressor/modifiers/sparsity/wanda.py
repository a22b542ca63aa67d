# SPDX-License-Identifier: Apache-2.0
"""Wanda: prune by magnitude times input norm, without weight updates (arXiv:2306.11695)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module

from llmcompressor.core.contract import ELEMENTWISE, Cost, DataSize
from llmcompressor.modifiers.sparsity.base import OneShotPruningModifier
from llmcompressor.modifiers.sparsity.targets import matrix_of, matrix_shape
from llmcompressor.numerics.wanda import wanda_prune
from llmcompressor.observers.column_statistics import ColumnSquares

_VISITS = 45


class WandaPruningModifier(OneShotPruningModifier):
    """Zero, in each row, the weights with the smallest magnitude times input norm.

    Example::

        WandaPruningModifier(sparsity=0.5, mask_structure="2:4", ignore=["lm_head"])
    """

    def new_statistics(self, module: Module, input_TC: Tensor, twin: bool) -> ColumnSquares:
        """Sums of squares of the input columns."""
        return self._new_column_squares(module, input_TC, twin)

    def mean_square(self, statistics: ColumnSquares) -> Tensor:
        """Mean square of each input column."""
        return statistics.mean_square()

    def prune(self, modules: Sequence[Module]) -> None:
        """Zero the weights with the lowest scores."""
        for module in modules:
            statistics = self._inputs.of(module)
            assert statistics is not None
            weight_RC = matrix_of(module)
            mean_square_C = self.mean_square(statistics).to(weight_RC.device)
            pruned_RC, lost_R = wanda_prune(
                weight_RC, mean_square_C, self.sparsity_of(module), self._group
            )
            self.put(
                module,
                pruned_RC,
                tokens=statistics.tokens,
                loss=0.5 * float(lost_R.sum()) * statistics.tokens,
                dampening=None,
            )

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """A pass over every weight, and sums by input column."""
        shapes = [matrix_shape(module) for module in modules]
        columns = max((shape[1] for shape in shapes), default=0)
        elements = sum(rows * width for rows, width in shapes)
        return Cost(
            flops=data.tokens * columns + ELEMENTWISE * _VISITS * elements,
            held_bytes=4 * columns,
            summed_bytes=4 * columns,
            peak_bytes=13 * max((rows * width for rows, width in shapes), default=0),
        )
