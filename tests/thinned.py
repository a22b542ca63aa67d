# SPDX-License-Identifier: Apache-2.0
"""Products of cases of which a few always run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["thinned"]


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
