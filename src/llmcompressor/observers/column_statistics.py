# SPDX-License-Identifier: Apache-2.0
"""Statistics of the columns of an input: squares, sizes and extremes, and all sums together.

They have the methods of :class:`~llmcompressor.observers.input_statistics.InputStatistics`:
``update`` with the tokens of a batch, ``include`` with sums that were kept, ``sum_over`` ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.errors import NonFiniteError
from llmcompressor.numerics.gram import add_column_squares
from llmcompressor.numerics.input_sums import InputSums
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.runtime.collectives import Ranks


def _bad_inputs(name: str) -> NonFiniteError:
    return NonFiniteError(
        f"The activations that go into {name} hold NaN or infinity. Look for a bad weight "
        "upstream, or load the model with precision='float32'."
    )


class ColumnSquares:
    """Sums of squares of the columns of an input.

    Args:
        columns: C, the number of input features.
        device: device of the sums.
        name: name of the module, for errors.

    Attributes:
        tokens: number of tokens accumulated.
        columns: C, the number of input features.
    """

    def __init__(self, columns: int, device: torch.device | str, name: str) -> None:
        self.tokens, self.columns = 0, columns
        self._name = name
        self._squares_C = torch.zeros(columns, device=device)

    def update(self, tokens_TC: Tensor, reference_TC: Tensor | None = None) -> None:
        """Accumulate the tokens of one batch, ``[T, C]``."""
        self.tokens += len(tokens_TC)
        add_column_squares(self._squares_C, tokens_TC)

    def include(self, sums: InputSums) -> None:
        """Accumulate kept sums."""
        self.tokens += sums.tokens
        self._squares_C += sums.squares_C.to(self._squares_C.device)

    def sum_over(self, ranks: Ranks, owner: int | None = None) -> None:
        """Add what all ranks have accumulated, on all of them; see :class:`.InputStatistics`."""
        what = f"squares of the inputs of {self._name}"
        self._squares_C = ranks.sum_all(self._squares_C, what=what)
        self.tokens = int(ranks.sum_all(torch.tensor(self.tokens), what=what))

    @property
    def squares(self) -> Tensor:
        """Sum of squares of each column, float32 ``[C]``.

        Raises:
            NonFiniteError: the activations hold NaN or infinity.
        """
        if not bool(torch.isfinite(self._squares_C).all()):
            raise _bad_inputs(self._name)
        return self._squares_C

    def mean_square(self) -> Tensor:
        """Mean square of each input column, float32 ``[C]``; errors as of :attr:`squares`."""
        return self.squares / self.tokens


class ColumnSizes:
    """Sums of absolute values of the columns of an input; arguments as for ColumnSquares.

    Attributes:
        sizes: the sums, float32 ``[C]``.
    """

    def __init__(self, columns: int, device: torch.device | str, name: str) -> None:
        self._name = name
        self.sizes = torch.zeros(columns, dtype=torch.float32, device=device)

    def update(self, tokens_TC: Tensor) -> None:
        """Accumulate the tokens of one batch, ``[T, C]``."""
        self.sizes += tokens_TC.abs().sum(dim=0, dtype=torch.float32).to(self.sizes.device)

    def include(self, sums: InputSums) -> None:
        """Accumulate kept sums."""
        self.sizes += sums.sizes_C.to(self.sizes.device)

    def sum_over(self, ranks: Ranks, owner: int | None = None) -> None:
        """Add what all ranks have accumulated, on each of them."""
        self.sizes = ranks.sum_all(self.sizes, what=f"sizes of the inputs of {self._name}")


class ColumnExtremes:
    """Minimum and maximum of the columns of an input; arguments as for ColumnSquares.

    Attributes:
        tokens: number of tokens accumulated.
        columns: C, the number of input features.
        least: the minima, float32 ``[C]``.
        greatest: the maxima.
    """

    def __init__(self, columns: int, device: torch.device | str, name: str) -> None:
        self.tokens, self.columns = 0, columns
        self._name = name
        self.least = torch.full((columns,), torch.inf, device=device)
        self.greatest = torch.full((columns,), -torch.inf, device=device)

    def update(self, input_TC: Tensor) -> None:
        """Accumulate the tokens of one batch, ``[T, C]``."""
        if not len(input_TC):
            return
        least_C, greatest_C = input_TC.detach().aminmax(dim=0)
        self._widen(len(input_TC), least_C.float(), greatest_C.float())

    def include(self, sums: InputSums) -> None:
        """Accumulate kept sums."""
        self._widen(sums.tokens, *(one.to(self.least) for one in (sums.least_C, sums.greatest_C)))

    def _widen(self, tokens: int, least_C: Tensor, greatest_C: Tensor) -> None:
        self.tokens += tokens
        self.least = torch.minimum(self.least, least_C)
        self.greatest = torch.maximum(self.greatest, greatest_C)

    def sum_over(self, ranks: Ranks, owner: int | None = None) -> None:
        """Take the extremes of all ranks, on each of them."""
        what = f"extremes of the inputs of {self._name}"
        self.least = ranks.min_all(self.least, what=what)
        self.greatest = ranks.max_all(self.greatest, what=what)
        self.tokens = int(ranks.sum_all(torch.tensor(self.tokens), what=what))

    @property
    def range(self) -> Tensor:
        """Maximum minus minimum, float32 ``[C]``.

        Raises:
            NonFiniteError: the activations hold NaN or infinity.
        """
        range_C = self.greatest - self.least
        if not bool(torch.isfinite(range_C).all()):
            raise _bad_inputs(self._name)
        return range_C


class SumCollector:
    """All sums of one input, each accumulated as the technique that needs it does.

    Args:
        columns: C, the number of input features.
        device: device of the sums.
        name: name of the module, for errors.
    """

    def __init__(self, columns: int, device: torch.device | str, name: str) -> None:
        self._moments = InputStatistics(columns, device, name=name)
        self._squares = ColumnSquares(columns, device, name)
        self._sizes = ColumnSizes(columns, device, name)
        self._extremes = ColumnExtremes(columns, device, name)

    @property
    def tokens(self) -> int:
        """Number of tokens accumulated."""
        return self._moments.tokens

    def update(self, input_TC: Tensor) -> None:
        """Accumulate the tokens of one batch, ``[T, C]``."""
        for one in (self._moments, self._squares, self._sizes, self._extremes):
            one.update(input_TC)

    def sums(self) -> InputSums:
        """The sums so far; NonFiniteError if the activations hold NaN or infinity."""
        return InputSums(
            self.tokens,
            self._moments.gram,
            self._squares.squares,
            self._sizes.sizes,
            self._extremes.least,
            self._extremes.greatest,
        )
