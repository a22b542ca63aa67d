# SPDX-License-Identifier: Apache-2.0
r"""Hadamard matrices: n x n, entries ±1, :math:`H H^\top = n I`.

How each order is reached (n is 1, 2 or a multiple of 4):

==================  ============================================================================
Sylvester           n = 2^k: the Kronecker power of [[1, 1], [1, -1]]
Paley I             n = q + 1, q = 3 mod 4: from the quadratic character of a field of q elements
Paley II            n = 2 (q + 1), q = 1 mod 4
Goethals-Seidel     n = 4 m: four circulants whose squares sum to n I; m = 23, 29, 39, 43, 47, 59
Kronecker product   n = a b of the above
==================  ============================================================================

q is a prime or the square of one. Together they reach every multiple of 4 up to 256, and 2^k times
each of these, which covers the widths that language models have (11008 = 64 * 172, 18944 = 128 *
148). Paley, J. Math. Phys. 12 (1933); Goethals and Seidel, J. Austral. Math. Soc. 11 (1970), where
the arrays stand; the first rows of the circulants are those of Williamson's and Turyn's matrices.

Legend: N order; B the part that is no power of two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

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
    if _is_field(base - 1) and (base - 1) % 4 == 3:
        return functools.partial(_paley_1, base - 1)
    half = base // 2 - 1
    if base % 2 == 0 and half % 4 == 1 and _is_field(half):
        return functools.partial(_paley_2, half)
    if base // 4 in _CIRCULANTS and base % 4 == 0:
        return functools.partial(_goethals_seidel, _CIRCULANTS[base // 4], base // 4)
    for factor in range(12, math.isqrt(base) + 1, 4):
        other = base // factor
        if base % factor == 0 and other % 4 == 0 and _maker(factor) and _maker(other):
            return functools.partial(_product, factor, other)
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
    """``Q[a, b]`` = 1 where a - b is a non-zero square of the field of q elements, -1, 0 for a=b.

    The elements of a field of p² are a + b t with t² = g, g no square modulo p, numbered a p + b.
    """
    p = q if _is_prime(q) else math.isqrt(q)
    if p == q:
        square_of = [x * x % p for x in range(p)]
        places = torch.arange(q)
        differences = (places[:, None] - places) % p
    else:
        squares = {x * x % p for x in range(p)}
        g = next(x for x in range(2, p) if x not in squares)
        square_of = [
            (a * a + g * b * b) % p * p + 2 * a * b % p for a in range(p) for b in range(p)
        ]
        high, low = torch.arange(q) // p, torch.arange(q) % p
        differences = (high[:, None] - high) % p * p + (low[:, None] - low) % p
    character = torch.full((q,), -1.0, dtype=torch.float64)
    character[square_of] = 1.0
    character[0] = 0.0
    return character[differences]


def _goethals_seidel(rows: tuple[int, int, int, int], m: int) -> Tensor:
    """The array of Goethals and Seidel for circulants with A Aᵀ + B Bᵀ + C Cᵀ + D Dᵀ = 4 m I."""
    A, B, C, D = (_circulant(row, m) for row in rows)
    R = torch.eye(m, dtype=torch.float64).flip(0)
    array = [
        [A, B @ R, C @ R, D @ R],
        [-B @ R, A, D.T @ R, -C.T @ R],
        [-C @ R, -D.T @ R, A, B.T @ R],
        [-D @ R, C.T @ R, -B.T @ R, A],
    ]
    return torch.cat([torch.cat(row, 1) for row in array])


def _circulant(bits: int, m: int) -> Tensor:
    first = torch.tensor([2 * int(bit) - 1 for bit in f"{bits:0{m}b}"], dtype=torch.float64)
    return torch.stack([first.roll(shift) for shift in range(m)])


def _is_field(q: int) -> bool:
    """Whether q is a prime, or the square of an odd one."""
    root = math.isqrt(max(q, 0))
    return _is_prime(q) or (root * root == q and root > 2 and _is_prime(root))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % divisor for divisor in _trial(n))


def _trial(n: int) -> Iterator[int]:
    yield from range(2, math.isqrt(n) + 1)
