# SPDX-License-Identifier: Apache-2.0
"""Rows that are constant on the orbits of a multiplier make what they are said to make."""

from __future__ import annotations

import pytest
import torch

from llmcompressor.numerics.hadamard import (
    circulants,
    four_rows,
    has_circulants,
    has_t_circulants,
    t_circulants,
)

ORDERS = [m for m in range(2, 1000) if has_circulants(m)]
T_ORDERS = [t for t in range(2, 1000) if has_t_circulants(t)]


def autocorrelations(rows: list[list[int]]) -> list[int]:
    """The sum of the rows' periodic autocorrelations at each shift."""
    rows_RM = torch.tensor(rows)
    return [int((rows_RM * rows_RM.roll(shift, 1)).sum()) for shift in range(len(rows[0]))]


def test_orders() -> None:
    assert ORDERS[:8] == [103, 127, 151, 163, 191, 223, 239, 251]
    assert ORDERS[8:] == [283, 311, 463, 487, 491]
    assert T_ORDERS == [19, 43, 67, 73]


@pytest.mark.parametrize("m", ORDERS)
def test_circulants(m: int) -> None:
    rows = circulants(m)
    assert all(len(row) == m and set(row) == {-1, 1} for row in rows)
    assert autocorrelations(rows) == [4 * m] + [0] * (m - 1)


@pytest.mark.parametrize("t", T_ORDERS)
def test_t_circulants(t: int) -> None:
    rows = t_circulants(t)
    assert all(sorted(map(abs, place)) == [0, 0, 0, 1] for place in zip(*rows, strict=True))
    assert autocorrelations(rows) == [t] + [0] * (t - 1)


def test_orbits() -> None:
    """Of 2 modulo 7 they are 0, {1, 2, 4} and {3, 5, 6}; a quotient by 7 has its own."""
    assert four_rows(7, 7, 2, "018")[0] == [1, 1, 1, -1, 1, -1, -1]
    assert four_rows(7, 7, 2, "018")[3] == [1, -1, -1, 1, -1, 1, 1]
    assert four_rows(6, 3, 2, "0480")[:2] == [[1, 1, 1, -1, 1, 1], [1, -1, -1, 1, 1, 1]]
