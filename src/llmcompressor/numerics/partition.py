# SPDX-License-Identifier: Apache-2.0
"""Partition of a matrix into cells that share a scale.

Shapes: R rows, C columns; h, w the height and width of a cell; Y, X the number of cells down and
across; G column groups. Leading batch dimensions (``...``) are supported everywhere.

====================  ==============  ===============  ==========================
strategy              ``Partition``   cell             scale
====================  ==============  ===============  ==========================
tensor                (0, 0)          whole matrix     [1]
channel               (1, 0)          a row            [R, 1]
group of g            (1, g)          g of a row       [R, ceil(C / g)]
block of r by c       (r, c)          r by c           [ceil(R / r), ceil(C / c)]
====================  ==============  ===============  ==========================

Cells at the right and lower edge may be ragged, and a matrix may be smaller than one cell.
Extremes, scales and zero points have the shape of the last column after any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from llmcompressor.errors import InputError
from llmcompressor.numerics.extremes import extremes_of_cells, magnitudes_of_cells
from llmcompressor.numerics.grid import Grid


@dataclass(frozen=True)
class Partition:
    """Cells of ``rows`` by ``columns``; 0 means all of them.

    >>> Partition(1, 128).shape(4, 256), Partition(2, 2).shape(3, 5), Partition(0, 0).shape(3, 5)
    ((4, 2), (2, 3), (1,))
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows < 0 or self.columns < 0:
            raise InputError(
                f"A cell cannot be {self.rows} by {self.columns}.",
                "Give positive sizes, or 0 for all rows or columns.",
            )

    def shape(self, R: int, C: int) -> tuple[int, ...]:
        """The shape of the scale of an ``R`` by ``C`` matrix."""
        return (1,) if self._is_whole else self._counts(R, C)

    def divides(self, R: int, C: int) -> bool:
        """Return True if no cell of an ``R`` by ``C`` matrix is ragged."""
        h, w = self._cell(R, C)
        return R % h == 0 and C % w == 0

    def cells(self, matrix: Tensor, *, fill: float = 0.0) -> Tensor:
        """The elements of each cell, row by row: [..., Y, X, h * w]; a view of rows.

        Missing elements of a ragged cell are ``fill``. Zero is on every grid and in every range, so
        it changes neither a scale nor a sum of errors.
        """
        return self._split(matrix, fill).transpose(-3, -2).flatten(-2)

    def extremes(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The minimum and maximum of each cell of [..., R, C], not empty, in its dtype."""
        R, C = matrix.shape[-2:]
        if self.divides(R, C):
            least, greatest = extremes_of_cells(self._split(matrix, 0.0))
        else:
            least = self._split(matrix, torch.inf).amin((-3, -1))
            greatest = self._split(matrix, -torch.inf).amax((-3, -1))
        shape = (*matrix.shape[:-2], *self.shape(R, C))
        return least.reshape(shape), greatest.reshape(shape)

    def magnitudes(self, matrix: Tensor) -> Tensor:
        """The absolute maximum of each cell, which is all that symmetric scales need.

        In the matrix's dtype, which is floating; NaN if a cell holds one.
        """
        found = magnitudes_of_cells(self._split(matrix, 0.0))
        return found.reshape(*matrix.shape[:-2], *self.shape(*matrix.shape[-2:]))

    def expand(self, scale: Tensor, R: int, C: int) -> Tensor:
        """The scale of each element, [..., R, C]; a view if cells span whole rows."""
        scale_YX = self._as_cells(scale, R, C)
        h, w = self._cell(R, C)
        if scale_YX.shape[-1] > 1:
            scale_YX = scale_YX.repeat_interleave(w, -1)[..., :C]
        if h > 1 and scale_YX.shape[-2] > 1:
            scale_YX = scale_YX.repeat_interleave(h, -2)[..., :R, :]
        return scale_YX.expand(*scale_YX.shape[:-2], R, C)

    def sample(self, R: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows spread evenly over a matrix of ``R``, in whole cells, and these cells.

        Returns:
            Two int64 vectors: at least ``count`` rows, or all if there are fewer, and indices into
            the first dimension of scales with a row for each row of cells.

        >>> Partition(2, 0).sample(7, 3)
        (tensor([0, 1, 4, 5]), tensor([0, 2]))
        """
        h = self.rows or 1
        Y = -(-R // h)
        wanted = min(-(-count // h), Y)
        cells = torch.arange(wanted) * Y // wanted
        rows = (cells[:, None] * h + torch.arange(h)).flatten()
        return rows[rows < R], cells

    def per_column(self, scale: Tensor, R: int, C: int) -> tuple[Tensor, Tensor]:
        """The scale by row and column group, for column-by-column solvers.

        Returns:
            scale_RG: [..., R, G], a row of scales for each row of the matrix.
            group_of_column_C: int64 [C]; column c uses ``scale_RG[..., group_of_column_C[c]]``.

        >>> Partition(2, 2).per_column(torch.tensor([[1.0, 2.0]]), 2, 3)
        (tensor([[1., 2.],
                [1., 2.]]), tensor([0, 0, 1]))
        """
        scale_YX = self._as_cells(scale, R, C)
        h, w = self._cell(R, C)
        G = scale_YX.shape[-1]
        if scale_YX.shape[-2] > 1 and h > 1:
            scale_YX = scale_YX.repeat_interleave(h, -2)[..., :R, :]
        group_of_column_C = torch.arange(C, device=scale.device) // w
        return scale_YX.expand(*scale_YX.shape[:-2], R, G), group_of_column_C

    @property
    def _is_whole(self) -> bool:
        return self.rows == 0 and self.columns == 0

    def _cell(self, R: int, C: int) -> tuple[int, int]:
        """Height and width of a full cell, no larger than the matrix."""
        return min(self.rows or R, R), min(self.columns or C, C)

    def _counts(self, R: int, C: int) -> tuple[int, int]:
        h, w = self._cell(R, C)
        return -(-R // h), -(-C // w)

    def _as_cells(self, scale: Tensor, R: int, C: int) -> Tensor:
        """``scale`` as [..., Y, X]."""
        own = self.shape(R, C)
        if scale.ndim == 0 and self._is_whole:
            return scale.reshape(1, 1)
        if tuple(scale.shape[-len(own) :]) != own:
            raise InputError(
                f"A scale of shape {tuple(scale.shape)} does not fit a {R} by {C} matrix.",
                f"Its shape must end in {own}.",
            )
        return scale.unsqueeze(-1) if self._is_whole else scale

    def _split(self, matrix: Tensor, fill: float) -> Tensor:
        """[..., Y, h, X, w], padded with ``fill``; a view without padding."""
        R, C = matrix.shape[-2:]
        (h, w), (Y, X) = self._cell(R, C), self._counts(R, C)
        if not self.divides(R, C):
            matrix = F.pad(matrix, (0, X * w - C, 0, Y * h - R), value=fill)
        return matrix.reshape(*matrix.shape[:-2], Y, h, X, w)

    def apply(
        self,
        function: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        matrix: Tensor,
        scale: Tensor,
        zero: Tensor | None = None,
    ) -> Tensor:
        """Apply ``function(matrix, scale, zero)``, elementwise, with scales broadcast over cells.

        Scales are not materialized; only ragged partitions need a scale per element. The result,
        [..., R, C], has the dtype that the function returns.
        """
        R, C = matrix.shape[-2:]
        if not self.divides(R, C):
            wide_zero = None if zero is None else self.expand(zero, R, C)
            return function(matrix, self.expand(scale, R, C), wide_zero)
        per_cell = [
            None if part is None else self._as_cells(part, R, C).unsqueeze(-1).unsqueeze(-3)
            for part in (scale, zero)
        ]
        scale_Y1X1, zero_Y1X1 = per_cell
        assert scale_Y1X1 is not None
        return function(self._split(matrix, 0.0), scale_Y1X1, zero_Y1X1).reshape(matrix.shape)


def quantize_matrix(
    matrix: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid, partition: Partition
) -> Tensor:
    """:meth:`Grid.quantize` for a matrix [..., R, C] with one scale per cell."""
    return partition.apply(grid.quantize, matrix, scale, zero)


def dequantize_matrix(
    codes: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid, partition: Partition
) -> Tensor:
    """:meth:`Grid.dequantize` for codes [..., R, C] with one scale per cell."""
    return partition.apply(grid.dequantize, codes, scale, zero)


def fake_quantize_matrix(
    matrix: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid, partition: Partition
) -> Tensor:
    """:meth:`Grid.fake_quantize` for a matrix [..., R, C] with one scale per cell."""
    return partition.apply(grid.fake_quantize, matrix, scale, zero)
