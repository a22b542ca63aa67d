# SPDX-License-Identifier: Apache-2.0
r"""Hadamard matrices: n x n, entries ±1, :math:`H H^\top = n I`.

How each order is reached (n is 1, 2 or a multiple of 4):

==================  ============================================================================
Sylvester           n = 2^k: the Kronecker power of [[1, 1], [1, -1]]
Paley I             n = q + 1, q = 3 mod 4: from the quadratic character of a field of q elements
Paley II            n = 2 (q + 1), q = 1 mod 4
Goethals-Seidel     n = 4 m: four circulants whose squares sum to n I; m = 23, 29, 39, 43, 47, 59
Cooper-Wallis       n = 4 t w: T-sequences of length t and Williamson sequences of length w
Kronecker product   n = a b of the above
==================  ============================================================================

q is a power of a prime. Together they reach every multiple of 4 up to 664 but 268, 292, 412, 436,
508, 536, 584, 596, 604 and 652, orders for which a matrix exists but is not made here (668 is the
least for which none is known at all), and 2^k times each of these. That covers the widths that
language models have (11008 = 64 * 172, 18944 = 128 * 148, 13696 = 32 * 428). Paley, J. Math. Phys.
12 (1933); Goethals and Seidel, J. Austral. Math. Soc. 11 (1970), where the arrays stand; the first
rows of the circulants are those of Williamson's and Turyn's matrices; Cooper and J. Wallis, Bull.
Austral. Math. Soc. 7 (1972).

Legend: N order; B the part that is no power of two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from llmcompressor.numerics.circulants import (
    has_t_sequences,
    has_williamson,
    t_sequences,
    williamson,
)
from llmcompressor.numerics.finite_fields import is_prime_power, power_of_prime, powers

__all__ = [
    "fast_hadamard",
    "hadamard",
    "has_hadamard",
    "random_hadamard",
    "random_orthogonal",
    "split_order",
    "usable_block_sizes",
]

_CIRCULANTS: dict[int, tuple[int, int, int, int]] = {
    23: (0x7740BB, 0x71AD63, 0x5B3F36, 0x622D11),
    29: (0x192EF749, 0x1ED1F8B7, 0x1465FA62, 0x1C650A63),
    39: (0x7282619053, 0x7898528647, 0x73452128B3, 0x46A0EDC158),
    43: (0x467AECDD798, 0x6FC29B650FD, 0x7595E85EA6B, 0x63D260192F1),
    47: (0x5090C78A1F91, 0x44FC288E7B7A, 0x49704465BA91, 0x4970441A456E),
    59: (0x7DE99E8BD1627BC, 0x4BA761097433421, 0x610DCBA28BCCBDF, 0x4BA7610A8BCCBDE),
}
"""m → the first rows of four circulants, as m bits with a one for +1, the first entry foremost."""

_Make = Callable[[], Tensor]


def hadamard(order: int) -> Tensor:
    """A Hadamard matrix, float64 ``[N, N]``; always the same one.

    Raises:
        ValueError: none of this order is known here (:func:`has_hadamard`).

    >>> hadamard(4).int().tolist()
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    """
    power, base = split_order(order)
    return torch.kron(_sylvester(power), _base(base))


def has_hadamard(order: int) -> bool:
    """Whether :func:`hadamard` makes one of this order.

    >>> [n for n in range(1, 21) if has_hadamard(n)]
    [1, 2, 4, 8, 12, 16, 20]
    """
    return _split(order) is not None


def split_order(order: int) -> tuple[int, int]:
    """``order`` as the greatest power of two and the least other order that give it.

    Raises:
        ValueError: none of this order is known here.

    >>> split_order(11008), split_order(64), split_order(36)
    ((64, 172), (64, 1), (1, 36))
    """
    found = _split(order)
    if found is None:
        raise ValueError(f"no Hadamard matrix of order {order} is known here")
    return found


def usable_block_sizes(width: int, *, most: int = 4) -> list[int]:
    """The largest orders that divide ``width``: blocks of such a size can be rotated.

    >>> usable_block_sizes(11008), usable_block_sizes(90)
    ([11008, 5504, 2752, 1376], [2])
    """
    divisors = [n for n in range(width, 1, -1) if width % n == 0]
    return [n for n in divisors if has_hadamard(n)][:most]


def random_hadamard(order: int, generator: torch.Generator) -> Tensor:
    """H diag(s) with random signs s, float64 ``[N, N]``.

    Args:
        order: N.
        generator: on the CPU; equal seeds give equal matrices.

    Raises:
        ValueError: as :func:`hadamard`.
    """
    signs_N = torch.randint(0, 2, (order,), generator=generator).double() * 2 - 1
    return hadamard(order) * signs_N


def random_orthogonal(order: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix from the uniform (Haar) distribution, float64 ``[N, N]``.

    The Q of a Gaussian matrix's QR, with the signs that make the diagonal of R positive (Mezzadri,
    arXiv:math-ph/0609050); without them it would depend on how QR is computed.
    """
    gauss_NN = torch.randn(order, order, dtype=torch.float64, generator=generator)
    Q_NN, R_NN = torch.linalg.qr(gauss_NN)
    signed_NN: Tensor = Q_NN * R_NN.diagonal().sign()
    return signed_NN


def fast_hadamard(x: Tensor) -> Tensor:
    """``x @ hadamard(N)`` for the last dimension N, in N (log2 + B) instead of N² steps per row.

    The power of two is done by butterflies (the Walsh-Hadamard transform), the rest as a product.

    Args:
        x: ``[..., N]``, floating dtype; it is not changed.

    Raises:
        ValueError: as :func:`hadamard`.

    >>> fast_hadamard(torch.tensor([1.0, 0.0, 0.0, 0.0])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    power, base = split_order(x.shape[-1])
    y = x.reshape(*x.shape[:-1], power, base)
    y = y @ _base(base).to(y) if base > 1 else y.clone(memory_format=torch.contiguous_format)
    half = power // 2
    while half:
        pairs = y.view(*x.shape[:-1], -1, 2, half, base)
        _add_and_subtract_(pairs.select(-3, 0), pairs.select(-3, 1))
        half //= 2
    return y.flatten(-2)


def _add_and_subtract_(first: Tensor, second: Tensor) -> None:
    """A butterfly in place, with one temporary of half the size."""
    total = first + second
    second.neg_().add_(first)
    first.copy_(total)


# ---------------------------------------------------------------------- orders


@functools.lru_cache(maxsize=4096)
def _split(order: int) -> tuple[int, int] | None:
    if order < 1:
        return None
    power = order & -order
    base = order // power
    while power >= 1:
        if base == 1 or (base % 4 == 0 and _maker(base) is not None):
            return power, base
        power, base = power // 2, base * 2
    return None


@functools.lru_cache(maxsize=4096)
def _maker(base: int) -> _Make | None:
    """How a matrix of this order is made without splitting off a power of two."""
    if is_prime_power(base - 1) and (base - 1) % 4 == 3:
        return functools.partial(_paley_1, base - 1)
    half = base // 2 - 1
    if base % 2 == 0 and half % 4 == 1 and is_prime_power(half):
        return functools.partial(_paley_2, half)
    if base // 4 in _CIRCULANTS and base % 4 == 0:
        return functools.partial(_stored, base // 4)
    for factor in range(12, math.isqrt(base) + 1, 4):
        other = base // factor
        if base % factor == 0 and other % 4 == 0 and _maker(factor) and _maker(other):
            return functools.partial(_product, factor, other)
    return _cooper_wallis_of(base // 4) if base % 4 == 0 else None


def _cooper_wallis_of(length: int) -> _Make | None:
    for w in range(1, length, 2):
        t = length // w
        if length % w == 0 and has_williamson(w) and has_t_sequences(t):
            return functools.partial(_cooper_wallis, t, w)
    return None


@functools.lru_cache(maxsize=8)
def _base(order: int) -> Tensor:
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    make = _maker(order)
    assert make is not None
    return make()


def _product(first: int, second: int) -> Tensor:
    return torch.kron(_base(first), _base(second))


def _sylvester(power: int) -> Tensor:
    """``H[i, j] = (-1)^(number of ones that i and j share)``."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < power:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


# ---------------------------------------------------------------------- constructions


def _paley_1(q: int) -> Tensor:
    """I + S with S = [[0, 1], [-1, Q]], Q the character of differences (skew for q = 3 mod 4)."""
    S_NN = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    S_NN[0, 1:], S_NN[1:, 0] = 1, -1
    S_NN[1:, 1:] = _characters(q)
    return S_NN + torch.eye(q + 1, dtype=torch.float64)


def _paley_2(q: int) -> Tensor:
    """C ⊗ [[1, 1], [1, -1]] + I ⊗ [[1, -1], [-1, -1]], C = [[0, 1], [1, Q]] (symmetric)."""
    C = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    C[0, 1:], C[1:, 0] = 1, 1
    C[1:, 1:] = _characters(q)
    plus = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    minus = torch.tensor([[1, -1], [-1, -1]], dtype=torch.float64)
    return torch.kron(C, plus) + torch.kron(torch.eye(q + 1, dtype=torch.float64), minus)


def _characters(q: int) -> Tensor:
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


def _goethals_seidel(blocks: list[Tensor], m: int) -> Tensor:
    """The array of Goethals and Seidel for four blocks with A Aᵀ + B Bᵀ + C Cᵀ + D Dᵀ = n I.

    Each is a sum of products T ⊗ W, T a circulant of order m, the W symmetric and commuting.
    """
    A, B, C, D = blocks
    inner = len(A) // m
    R = torch.kron(torch.eye(m).flip(0), torch.eye(inner)).double()
    array = [
        [A, B @ R, C @ R, D @ R],
        [-B @ R, A, D.T @ R, -C.T @ R],
        [-C @ R, -D.T @ R, A, B.T @ R],
        [-D @ R, C.T @ R, -B.T @ R, A],
    ]
    return torch.cat([torch.cat(row, 1) for row in array])


def _stored(m: int) -> Tensor:
    rows = [[2 * int(bit) - 1 for bit in f"{row:0{m}b}"] for row in _CIRCULANTS[m]]
    return _goethals_seidel([_circulant(row) for row in rows], m)


def _cooper_wallis(t: int, w: int) -> Tensor:
    """Four sums of Tᵢ ⊗ Wⱼ, signed and placed as the entries of a quaternion's matrix."""
    T = [_circulant(row) for row in t_sequences(t)]
    W = [_circulant(row) for row in williamson(w)]
    places = [(0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)]
    signs = [(1, 1, 1, 1), (-1, 1, 1, -1), (-1, -1, 1, 1), (-1, 1, -1, 1)]
    blocks = torch.zeros(4, t * w, t * w, dtype=torch.float64)
    for row, i in itertools.product(range(4), range(4)):
        blocks[row] += signs[row][i] * torch.kron(T[i], W[places[row][i]])
    return _goethals_seidel(list(blocks), t)


def _circulant(row: list[int]) -> Tensor:
    first = torch.tensor(row, dtype=torch.float64)
    return torch.stack([first.roll(shift) for shift in range(len(row))])
