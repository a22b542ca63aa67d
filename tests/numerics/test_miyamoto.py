# SPDX-License-Identifier: Apache-2.0
"""Orders 4 q and 8 q from about half as much, over fields of prime and other orders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.hadamard import (
    miyamoto_4,
    miyamoto_8,
    paired_paley,
    paley_1,
    sylvester,
    symmetric_paley,
)


def is_hadamard(matrix: Tensor) -> bool:
    order = len(matrix)
    return set(matrix.unique().tolist()) == {-1, 1} and torch.equal(
        matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64)
    )


def is_paired(matrix: Tensor) -> bool:
    a, b, c, d = (block for half in matrix.chunk(2) for block in half.chunk(2, 1))
    return bool((a * b * c * d == -1).all())


@pytest.mark.parametrize("p", [3, 7, 11, 19, 43])
def test_forms_of_paley(p: int) -> None:
    paired, symmetric = paired_paley(p), symmetric_paley(p)
    assert is_hadamard(paired)
    assert is_paired(paired)
    assert is_hadamard(symmetric)
    assert torch.equal(symmetric, symmetric.T)


@pytest.mark.parametrize("q", [5, 9, 13, 25])
def test_four_times(q: int) -> None:
    K = sylvester(q - 1) if q < 10 else torch.kron(sylvester((q - 1) // 12), symmetric_paley(11))
    matrix = miyamoto_4(q, K)
    assert len(matrix) == 4 * q
    assert is_hadamard(matrix)
    assert is_paired(matrix)


def test_four_times_from_any_matrix() -> None:
    matrix = miyamoto_4(13, paley_1(11))
    assert is_hadamard(matrix)
    assert not is_paired(matrix)  # Paley's is not symmetric


def test_eight_times() -> None:
    assert is_hadamard(miyamoto_8(3, paired_paley(3)))
    assert is_hadamard(miyamoto_8(7, paired_paley(11)))
    assert is_hadamard(miyamoto_8(27, miyamoto_4(13, symmetric_paley(11))))


def test_eight_times_needs_pairs() -> None:
    assert not is_hadamard(miyamoto_8(7, paley_1(11)))
