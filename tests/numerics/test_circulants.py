# SPDX-License-Identifier: Apache-2.0
"""T-sequences and Williamson sequences are what they are called."""

from __future__ import annotations

import pytest

from llmcompressor.numerics.hadamard import has_t_sequences, has_williamson, t_sequences, williamson


@pytest.mark.parametrize("t", [t for t in range(2, 130) if has_t_sequences(t)])
def test_t_sequences(t: int) -> None:
    rows = t_sequences(t)
    assert [len(row) for row in rows] == [t] * 4
    assert all(sum(map(abs, place)) == 1 for place in zip(*rows, strict=True))
    for shift in range(1, t):
        assert sum(row[i] * row[i + shift] for row in rows for i in range(t - shift)) == 0


@pytest.mark.parametrize("w", [w for w in range(1, 40) if has_williamson(w)])
def test_williamson(w: int) -> None:
    rows = williamson(w)
    assert all(len(row) == w and set(row) <= {-1, 1} for row in rows)
    assert all(row[1:] == row[:0:-1] for row in rows)
    for shift in range(1, w):
        assert sum(row[i] * row[(i + shift) % w] for row in rows for i in range(w)) == 0


def test_lengths() -> None:
    assert [t for t in range(2, 24) if has_t_sequences(t) and t % 2] == [
        *(3, 5, 7, 9, 11, 13, 15, 17, 21, 23)
    ]
    assert [w for w in range(1, 24) if has_williamson(w)] == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21]
