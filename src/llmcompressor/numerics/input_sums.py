# SPDX-License-Identifier: Apache-2.0
"""Sums over the tokens of an input: all that the solvers of weights need to know of the data.

With X the input, T tokens by C columns:

==========  ====================  ================================================
sum         of                    for
==========  ====================  ================================================
``gram``    ``XᵀX``               GPTQ, SparseGPT, AWQ
``squares`` x² of each column     Wanda, ranges that are weighted by importance
``sizes``   abs(x) of each one    AWQ
extremes    x of each one         SmoothQuant
==========  ====================  ================================================

In ``gram`` massive tokens count less (:func:`~llmcompressor.numerics.gram.limit_massive_tokens`).

Where an input is divided by a scale for each column, as smoothing does, so are its sums: none has
to be collected again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class InputSums:
    """Sums of one input, all float32.

    Attributes:
        tokens: T, the number of tokens; at least 1.
        gram_CC: ``XᵀX``, exactly symmetric.
        squares_C: sums of squares, which differ from the diagonal of ``gram_CC`` by rounding.
        sizes_C: sums of absolute values.
        least_C: the least value of each column.
        greatest_C: the greatest.
    """

    tokens: int
    gram_CC: Tensor
    squares_C: Tensor
    sizes_C: Tensor
    least_C: Tensor
    greatest_C: Tensor

    @property
    def columns(self) -> int:
        """C, the number of input features."""
        return len(self.squares_C)

    def divided_by(self, scale_C: Tensor) -> InputSums:
        """The sums of ``X / s``.

        Args:
            scale_C: s, positive, float32 ``[C]``.
        """
        scale_C = scale_C.to(self.squares_C)
        gram_CC = self.gram_CC / scale_C / scale_C.unsqueeze(-1)
        return InputSums(
            self.tokens,
            (gram_CC + gram_CC.mT) / 2,  # a quotient of quotients is not exactly symmetric
            self.squares_C / scale_C.square(),
            self.sizes_C / scale_C,
            self.least_C / scale_C,
            self.greatest_C / scale_C,
        )
