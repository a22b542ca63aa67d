# SPDX-License-Identifier: Apache-2.0
r"""Constructions of Hadamard matrices: Sylvester, Paley, Goethals-Seidel, Cooper-Wallis.

:mod:`llmcompressor.numerics.hadamard` says which order is made how. All matrices are float64.

Legend: N order; Q the quadratic character of the differences of a field's elements.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from llmcompressor.numerics.circulants import t_sequences, williamson
from llmcompressor.numerics.finite_fields import power_of_prime, powers
from llmcompressor.numerics.orbits import (
    circulants,
    has_t_circulants,
    t_circulants,
)

__all__ = [
    "characters",
    "cooper_wallis",
    "goethals_seidel",
    "goethals_seidel_array",
    "paley_1",
    "paley_2",
    "sylvester",
]


def sylvester(power: int) -> Tensor:
    """``H[i, j] = (-1)^(number of ones that i and j share)``."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < power:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def paley_1(q: int) -> Tensor:
    """I + S with S = [[0, 1], [-1, Q]], Q the character of differences (skew for q = 3 mod 4)."""
    S_NN = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    S_NN[0, 1:], S_NN[1:, 0] = 1, -1
    S_NN[1:, 1:] = characters(q)
    return S_NN + torch.eye(q + 1, dtype=torch.float64)


def paley_2(q: int) -> Tensor:
    """C ⊗ [[1, 1], [1, -1]] + I ⊗ [[1, -1], [-1, -1]], C = [[0, 1], [1, Q]] (symmetric)."""
    C = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    C[0, 1:], C[1:, 0] = 1, 1
    C[1:, 1:] = characters(q)
    plus = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    minus = torch.tensor([[1, -1], [-1, -1]], dtype=torch.float64)
    return torch.kron(C, plus) + torch.kron(torch.eye(q + 1, dtype=torch.float64), minus)


def characters(q: int) -> Tensor:
    """``Q[a, b]``: 0 for a = b, 1 where a - b is another square of the field, or -1."""
    found = power_of_prime(q)
    assert found is not None
    p, k = found
    squares = {x * x % p for x in range(p)} if k == 1 else powers(q)[0][::2]
    character_q = torch.full((q,), -1.0, dtype=torch.float64)
    character_q[list(squares)] = 1.0
    character_q[0] = 0.0
    numbers_q, differences_qq = torch.arange(q), torch.zeros(q, q, dtype=torch.int64)
    for place in (p**i for i in range(k)):
        digits_q = numbers_q // place % p
        differences_qq += (digits_q[:, None] - digits_q) % p * place
    return character_q[differences_qq]


def goethals_seidel(m: int) -> Tensor:
    """Of order 4 m, from the circulants that are stored."""
    return goethals_seidel_array([_circulant(row) for row in circulants(m)], _reversal(m))


def cooper_wallis(t: int, w: int) -> Tensor:
    """Four sums of Tᵢ ⊗ Wⱼ, signed and placed as the entries of a quaternion's matrix."""
    T = [_circulant(row) for row in (t_circulants if has_t_circulants(t) else t_sequences)(t)]
    W = [_circulant(row) for row in williamson(w)]
    places = [(0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)]
    signs = [(1, 1, 1, 1), (-1, 1, 1, -1), (-1, -1, 1, 1), (-1, 1, -1, 1)]
    blocks = torch.zeros(4, t * w, t * w, dtype=torch.float64)
    for row, i in itertools.product(range(4), range(4)):
        blocks[row] += signs[row][i] * torch.kron(T[i], W[places[row][i]])
    return goethals_seidel_array(list(blocks), torch.kron(_reversal(t), torch.eye(w)))


def goethals_seidel_array(blocks: list[Tensor], R: Tensor) -> Tensor:
    """The array of Goethals and Seidel.

    Args:
        blocks: A, B, C and D that commute, with A Aᵀ + B Bᵀ + C Cᵀ + D Dᵀ = n I.
        R: a permutation of order 2 with R A R = Aᵀ, and so for B, C and D.
    """
    A, B, C, D = blocks
    array = [
        [A, B @ R, C @ R, D @ R],
        [-B @ R, A, D.T @ R, -C.T @ R],
        [-C @ R, -D.T @ R, A, B.T @ R],
        [-D @ R, C.T @ R, -B.T @ R, A],
    ]
    return torch.cat([torch.cat(row, 1) for row in array])


def _reversal(m: int) -> Tensor:
    return torch.eye(m, dtype=torch.float64).flip(0)


def _circulant(row: list[int]) -> Tensor:
    first = torch.tensor(row, dtype=torch.float64)
    return torch.stack([first.roll(shift) for shift in range(len(row))])
