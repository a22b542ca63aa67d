# SPDX-License-Identifier: Apache-2.0
"""Batching of small problems of one kind, to solve them in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from llmcompressor.numerics.hessian import SingularHessianError

Problem = TypeVar("Problem")
Solution = TypeVar("Solution")

BATCH_ELEMENTS = 2**24
"""Elements of the Gram matrices of one batch: what is gained by batching ends there."""


def batch_by_kind(
    kinds: Sequence[object],
    columns: Sequence[int],
    limit: int = BATCH_ELEMENTS,
    *,
    most: int | None = None,
) -> Iterator[list[int]]:
    """Group the indices of problems that can be solved together: those of equal kinds.

    A batch has at most ``most`` problems, or by default so many that their Gram matrices, of
    ``columns`` squared elements each, have at most ``limit``; a larger problem is a batch of its
    own.

    >>> list(batch_by_kind("aba", [2, 2, 2], limit=8))
    [[0, 2], [1]]
    >>> list(batch_by_kind("aaa", [2, 2, 2], most=2))
    [[0, 1], [2]]
    """
    alike: dict[object, list[int]] = {}
    for index, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(index)
    for indices in alike.values():
        size = most or max(1, limit // columns[indices[0]] ** 2)
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def solve_batched_or_single(
    problems: Sequence[Problem],
    together: Callable[[Sequence[Problem]], list[Solution]],
    hopeless: Callable[[Problem], Solution],
) -> list[Solution]:
    """Solve problems of one kind in one call, or one by one if one of them cannot be factorized.

    ``together`` then raises ``SingularHessianError``; ``hopeless`` solves a problem that cannot be
    factorized by itself either.
    """
    with contextlib.suppress(SingularHessianError):
        return together(problems)
    # outside the handler: the exception, and the tensors of its frames, are freed
    if len(problems) == 1:
        return [hopeless(problems[0])]
    return [solve_batched_or_single([one], together, hopeless)[0] for one in problems]
