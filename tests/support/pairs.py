# SPDX-License-Identifier: Apache-2.0
"""A few cases of a product of arguments, in place of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["each", "pairs"]


def each(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize with every value of every argument: as many cases as the longest axis has values.

    Every value stands in some case, beside a value of each other argument.
    """
    return _parametrize(axes, strength=1)


def pairs(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize with every pair of values of any two arguments, in about as few cases as do."""
    return _parametrize(axes, strength=2)


def _parametrize(axes: dict[str, Iterable[Any]], strength: int) -> pytest.MarkDecorator:
    values = [list(axis) for axis in axes.values()]
    cases = [
        [axis[place] for axis, place in zip(values, one, strict=True)]
        for one in covering([len(axis) for axis in values], strength)
    ]
    return pytest.mark.parametrize(list(axes), cases, ids=_name)


def _name(value: object) -> str:
    return getattr(value, "__name__", str(value))


def covering(sizes: list[int], strength: int) -> list[tuple[int, ...]]:
    """Places on axes of these sizes that hold every combination of ``strength`` of them.

    >>> covering([2, 3], 1)
    [(0, 0), (1, 1), (0, 2)]
    >>> len(covering([3, 3, 2, 2], 2))
    9
    """

    def held(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), strength))

    ahead = {case: held(case) for case in itertools.product(*map(range, sizes))}
    wanted = set().union(*ahead.values())
    chosen = []
    while wanted:
        best = max(ahead, key=lambda case: len(ahead[case] & wanted))
        wanted -= ahead[best]
        chosen.append(best)
    return chosen
