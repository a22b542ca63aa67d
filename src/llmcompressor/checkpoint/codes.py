# SPDX-License-Identifier: Apache-2.0
"""Quantized codes of a weight, computed in cache-sized pieces on all cores.

Rounding a matrix takes half a dozen elementwise operations. Over the whole matrix each of them
reads and writes main memory; piece by piece only the first reads and the last writes it. Each piece
is processed by one thread: torch's own parallelism synchronizes all threads after every operation,
which is slow when a core is busy elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from llmcompressor.numerics.partition import Partition
from llmcompressor.threads import each_on_one_thread

__all__ = ["codes_of"]

_ELEMENTS = 2**19
"""Of a piece: small enough for caches, large enough that starting operations takes no time."""


def codes_of(
    matrix_RC: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    quotients: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    partition: Partition,
    convert: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the codes of a matrix in their stored form.

    Args:
        matrix_RC: ``[R, C]``, floating dtype.
        scale: effective scale, of the partition's shape.
        zero: zero point of that shape, or ``None``.
        quotients: from weight, scale and zero point to the value that is rounded, elementwise,
            such as :meth:`Grid.limit`.
        partition: which elements share a scale.
        convert: from the quotients of some rows, clamped to the grid, to their stored form;
            rows stay rows.

    Returns:
        The results of ``convert``, concatenated along the rows.
    """
    R, C = matrix_RC.shape
    if matrix_RC.device.type != "cpu" or R * C <= _ELEMENTS:
        return convert(partition.apply(quotients, matrix_RC, scale, zero))
    spans = list(_spans(R, C, partition))

    def work(span: tuple[int, int]) -> Tensor:
        first, last = span
        cell = _scales(scale, span, R, partition)
        offset = None if zero is None else _scales(zero, span, R, partition)
        return convert(partition.apply(quotients, matrix_RC[first:last], cell, offset))

    row = convert(torch.zeros(1, C))
    stored = row.new_empty((R, *row.shape[1:]))

    def store(span: tuple[int, int]) -> None:
        stored[span[0] : span[1]] = work(span)

    each_on_one_thread(store, spans)
    return stored


def _spans(R: int, C: int, partition: Partition) -> Iterator[tuple[int, int]]:
    """Yield the first and last row of each piece; no group is split."""
    height = partition.rows if 0 < partition.rows < R else 1
    rows = max(_ELEMENTS // (C * height), 1) * height
    for first in range(0, R, rows):
        yield first, min(first + rows, R)


def _scales(scale: Tensor, span: tuple[int, int], R: int, partition: Partition) -> Tensor:
    """Return the scales of the rows in ``span``."""
    if partition.rows == 0 or scale.ndim < 2 or scale.shape[0] == 1 < R:
        return scale
    first, last = span
    return scale[first // partition.rows : -(-last // partition.rows)]
