# SPDX-License-Identifier: Apache-2.0
"""Small problems of one kind, to be solved in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["BATCH_ELEMENTS", "batches_alike"]

BATCH_ELEMENTS = 2**24
"""Elements of the Gram matrices of one batch: what is gained by batching ends there."""


def batches_alike(
    kinds: Sequence[object], columns: Sequence[int], limit: int = BATCH_ELEMENTS
) -> Iterator[list[int]]:
    """The numbers of problems that can be solved together.

    Args:
        kinds: of each problem; equal for those that can be stacked.
        columns: of each problem, whose Gram matrix has the square of it as elements.
        limit: elements of the Gram matrices of one batch; a problem above it is alone.

    >>> list(batches_alike("aba", [2, 2, 2], limit=8))
    [[0, 2], [1]]
    """
    alike: dict[object, list[int]] = {}
    for index, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(index)
    for indices in alike.values():
        size = max(1, limit // columns[indices[0]] ** 2)
        for start in range(0, len(indices), size):
            yield indices[start : start + size]
