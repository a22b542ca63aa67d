# SPDX-License-Identifier: Apache-2.0
r"""Hadamard matrices of order 4 q and 8 q, q a power of a prime, from one K of about half as much.

Let U be Q, the quadratic character of the differences of a field of q elements, without the row and
the column of 0, the a with Q[0, a] = 1 before the others: two halves. Then

.. math:: U U^\top = q I - 2 \begin{pmatrix} J & 0 \\ 0 & J \end{pmatrix}

with J all ones, and U has a zero diagonal. For U₂ made of U and a V with V Vᵀ = c I whose entries
are ±1 where U₂ is 0, and 0 elsewhere, the core

.. math:: T = U_2 \otimes \begin{pmatrix} 1 & 1 \\ 1 & 1 \end{pmatrix}
            + V \otimes \begin{pmatrix} 1 & -1 \\ -1 & 1 \end{pmatrix}

has entries ±1, and T Tᵀ is a multiple of I less a constant in each of as many blocks of order q - 1
as rows and columns are missing. Columns that are constant on the blocks make up for it; so do
rows, as the rows of U sum to 0 over one half and to 1 or -1 over the other.

- 4 q, q = 1 mod 4: U₂ is U twice along the diagonal, V = [[I, K], [-Kᵀ, I]], K of order q - 1.
- 8 q, q = 3 mod 4: U₂ is [[U, U], [U, -U]] twice, V = [[R, K], [-R Kᵀ R / 2, R]], where R is
  [[I, I], [-I, I]] and K, of order 2 q - 2, is paired: rows i and i + q - 1 and columns j and
  j + q - 1 make a Hadamard matrix of order 2, for every i and j. R Kᵀ R / 2 has entries ±1 then.

Miyamoto, J. Combin. Theory A 57 (1991), for 4 q; Seberry and Yamada in Contemporary Design Theory
(1992) for what it leads to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmcompressor.numerics.constructions import characters, paley_1, sylvester

__all__ = ["miyamoto_4", "miyamoto_8", "paired_paley", "symmetric_paley"]


def miyamoto_4(q: int, K: Tensor) -> Tensor:
    """Of order 4 q; paired if K is symmetric.

    Args:
        q: a power of a prime, 1 mod 4.
        K: a Hadamard matrix of order q - 1.
    """
    n, U, S = q - 1, _halves(q), sylvester(4)
    columns = torch.ones(4, 4).double() - 2 * torch.eye(4)
    rows = S * torch.tensor([1, -1, 1, -1])
    matrix = _bordered(
        S @ columns / 2, rows, columns, torch.kron(_eye(2), U), _blocks(_eye(n), K, -K.T, _eye(n))
    )
    upper, lower = range(4, 4 + 2 * n), range(4 + 2 * n, 4 * q)
    return matrix[[0, 1, *upper, 2, 3, *lower]][:, [0, 1, *upper, 3, 2, *lower]]


def miyamoto_8(q: int, K: Tensor) -> Tensor:
    """Of order 8 q.

    Args:
        q: a power of a prime, 3 mod 4.
        K: a paired Hadamard matrix of order 2 q - 2.
    """
    U, H, S = _halves(q), sylvester(2), sylvester(4)
    turn = torch.tensor([[1, 1], [-1, 1]]).double()
    R = torch.kron(turn, _eye(q - 1))
    U_2 = torch.kron(_eye(2), torch.kron(H, U))
    # the sums of the rows of U, in the places of a block: which half of U_2, which U, which half
    sums = torch.kron(torch.kron(_eye(2), H), torch.tensor([[0, 1], [-1, 0]]).double())
    columns = _middle_last(torch.kron(torch.ones(4, 4).double() - 2 * _eye(4), H).T).T
    corner = _middle_last(torch.kron(S, _eye(2)))
    return _bordered(
        corner @ columns / 2, -corner @ sums, columns, U_2, _blocks(R, K, -R @ K.T @ R / 2, R)
    )


def paired_paley(p: int) -> Tensor:
    """Paley's first matrix, paired: a with -1 / a, 0 with infinity.

    With χ the character, the product of the four entries is χ(a - b) χ(1/b - 1/a) χ(-1/a - b)
    χ(a + 1/b) = χ(-1) = -1.

    Args:
        p: a prime, 3 mod 4.
    """
    partner = [1, 0, *(1 + -pow(a, -1, p) % p for a in range(1, p))]  # infinity, 0, 1, ...
    first = [x for x in range(p + 1) if x < partner[x]]
    order = first + [partner[x] for x in first]
    return paley_1(p)[order][:, order]


def symmetric_paley(p: int) -> Tensor:
    """Paley's first matrix with columns a and -a exchanged and all rows but one negated.

    Args:
        p: a prime, 3 mod 4.
    """
    matrix = paley_1(p)[:, [0, *(1 + -a % p for a in range(p))]]
    matrix[1:] *= -1
    return matrix


def _halves(q: int) -> Tensor:
    """U."""
    Q = characters(q)
    order = torch.cat([(Q[0] > 0).nonzero(), (Q[0] < 0).nonzero()]).flatten()
    return Q[order][:, order]


def _bordered(corner: Tensor, rows: Tensor, columns: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """The core of U and V; ``rows`` and ``columns`` hold an entry for each of its blocks."""
    size = 2 * len(U) // len(corner)
    ones = torch.ones(2, 2).double()
    core = torch.kron(U, ones) + torch.kron(V, 2 * _eye(2) - ones)
    return _blocks(
        corner, rows.repeat_interleave(size, 1), columns.repeat_interleave(size, 0), core
    )


def _blocks(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.cat([torch.cat([a, b], 1), torch.cat([c, d], 1)])


def _middle_last(matrix: Tensor) -> Tensor:
    """Columns numbered by three bits x, y, z, put in the order of x, z, y."""
    return matrix.reshape(8, 2, 2, 2).transpose(2, 3).reshape(8, 8)


def _eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)
