# SPDX-License-Identifier: Apache-2.0
"""Cases of which a few always run, and the others where ``make test TESTS=`` runs all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["few", "thinned"]


def few(cases: Iterable[Any], *always: Any) -> list[Any]:
    """``cases``, for ``pytest.mark.parametrize``: all but ``always`` are marked ``slow``.

    A case is a value, or a tuple of the values of several arguments.
    """
    cases = list(cases)
    unknown = [one for one in always if one not in cases]
    assert always, "none would run"
    assert not unknown, f"{unknown} are no cases of {cases}"
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=[] if one in always else [pytest.mark.slow],
        )
        for one in cases
    ]


def thinned(*axes: Iterable[Any]) -> list[Any]:
    """The product of ``axes``, for ``pytest.mark.parametrize``.

    As many cases as the longest axis has values run always, and hold every value of every axis;
    the others are marked ``slow``. A tuple on an axis stands for several arguments.
    """
    values = [list(axis) for axis in axes]
    longest = max(len(axis) for axis in values)
    always = {tuple(turn % len(axis) for axis in values) for turn in range(longest)}
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in values)):
        case: list[Any] = []
        for axis, place in zip(values, places, strict=True):
            value = axis[place]
            case.extend(value if isinstance(value, tuple) else (value,))
        marks = [] if places in always else [pytest.mark.slow]
        cases.append(pytest.param(*case, marks=marks))
    return cases
