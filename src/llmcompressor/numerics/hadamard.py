# SPDX-License-Identifier: Apache-2.0
r"""Hadamard matrices: n x n, entries ±1, :math:`H H^\top = n I`.

An order is the largest power of two times a base that one of these reaches:

==================  ============================================================================
Sylvester           n = 2^k: the Kronecker power of [[1, 1], [1, -1]]
Paley I             n = q + 1, q = 3 mod 4: from the quadratic character of a field of q elements
Paley II            n = 2 (q + 1), q = 1 mod 4
table               n a multiple of 4 up to 256: Sloane's library, as compressed-tensors ships it
==================  ============================================================================

q is a power of a prime. Paley, J. Math. Phys. 12 (1933). Other orders have no matrix here, and
raise ``ValueError``: a rotation takes blocks of an order that divides the width, or a random
orthogonal matrix.

Legend: N order; B the part that is no power of two.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def hadamard(order: int) -> Tensor:
    """A Hadamard matrix, float64 ``[N, N]``; deterministic for each order.

    >>> hadamard(4).int().tolist()
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    """
    power, base = split_order(order)
    sylvester = torch.ones(1, 1, dtype=torch.float64)  # (-1)^(number of ones that i and j share)
    while len(sylvester) < power:
        rows = [torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)]
        sylvester = torch.cat(rows)
    return torch.kron(sylvester, _base(base))


def has_hadamard(order: int) -> bool:
    """Return True if :func:`hadamard` supports this order.

    >>> [n for n in range(1, 21) if has_hadamard(n)]
    [1, 2, 4, 8, 12, 16, 20]
    """
    return _split(order) is not None


def split_order(order: int) -> tuple[int, int]:
    """Factor ``order`` into the largest power of two and the smallest other supported order.

    >>> split_order(11008), split_order(64), split_order(36)
    ((64, 172), (64, 1), (1, 36))
    """
    found = _split(order)
    if found is None:
        raise ValueError(f"no Hadamard matrix of order {order} is known here")
    return found


def usable_block_sizes(width: int, *, most: int = 4) -> list[int]:
    """The largest supported orders that divide ``width``: possible sizes of rotation blocks.

    >>> usable_block_sizes(11008), usable_block_sizes(90)
    ([11008, 5504, 2752, 1376], [2])
    """
    divisors = [n for n in range(width, 1, -1) if width % n == 0]
    return [n for n in divisors if has_hadamard(n)][:most]


def random_orthogonal(order: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix from the uniform (Haar) distribution, float64 ``[N, N]``.

    The Q of the QR decomposition of a Gaussian matrix, with signs that make the diagonal of R
    positive (Mezzadri, arXiv:math-ph/0609050); without them it would depend on the QR algorithm.
    """
    gauss_NN = torch.randn(order, order, dtype=torch.float64, generator=generator)
    Q_NN, R_NN = torch.linalg.qr(gauss_NN)
    signed_NN: Tensor = Q_NN * R_NN.diagonal().sign()
    return signed_NN


def fast_hadamard(x: Tensor, *, signs_N: Tensor | None = None) -> Tensor:
    """``x diag(signs) hadamard(N)`` along the last dimension N, as a new tensor.

    This takes N (log2 + B) steps per row instead of N². The power of two is computed by butterflies
    (the Walsh-Hadamard transform), the rest as a product. The signs, 1 or -1, are all 1 if
    ``None``.

    >>> fast_hadamard(torch.tensor([1.0, 0.0, 0.0, 0.0])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    power, base = split_order(x.shape[-1])
    y = (x if signs_N is None else x * signs_N.to(x)).reshape(*x.shape[:-1], power, base)
    if base > 1:
        y = y @ _base(base).to(y)
    elif signs_N is None:  # otherwise x is already a copy
        y = y.clone(memory_format=torch.contiguous_format)
    half = power // 2
    while half:
        pairs = y.view(*x.shape[:-1], -1, 2, half, base)
        first, second = pairs.select(-3, 0), pairs.select(-3, 1)
        total = first + second
        second.neg_().add_(first)
        first.copy_(total)
        half //= 2
    return y.flatten(-2)


# ---------------------------------------------------------------------- constructions


@functools.lru_cache(maxsize=4096)
def _split(order: int) -> tuple[int, int] | None:
    if order < 1:
        return None
    power = order & -order
    base = order // power
    while power >= 1:
        is_known = base % 4 == 0 and (_paley_field(base) or base in _table_orders())
        if base == 1 or is_known:
            return power, base
        power, base = power // 2, base * 2
    return None


@functools.lru_cache(maxsize=8)
def _base(order: int) -> Tensor:
    """The matrix of a base, float64, from the table or from C = [[0, 1], [±1, Q]].

    Q is the character of differences: skew for q = 3 mod 4, which gives C + I of order q + 1 with
    -1, and symmetric for 1 mod 4, C ⊗ [[1, 1], [1, -1]] + I ⊗ [[1, -1], [-1, -1]] of order 2 (q +
    1).
    """
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    q = _paley_field(order)
    if q is None:
        with safe_open(_table(), framework="pt") as file:
            matrix: Tensor = file.get_tensor(str(order))
        return matrix.double()
    is_first = q == order - 1
    C = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    C[0, 1:], C[1:, 0] = 1, -1 if is_first else 1
    C[1:, 1:] = _characters(q)
    eye = torch.eye(q + 1, dtype=torch.float64)
    if is_first:
        return C + eye
    plus = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    minus = torch.tensor([[1, -1], [-1, -1]], dtype=torch.float64)
    return torch.kron(C, plus) + torch.kron(eye, minus)


def _paley_field(order: int) -> int | None:
    """Number of elements of the field that Paley's constructions of this order take."""
    half = order // 2 - 1
    if _prime_and_exponent(order - 1):
        return order - 1
    return half if half % 4 == 1 and _prime_and_exponent(half) else None


@functools.cache
def _table() -> Path:
    """The file of Hadamard matrices that compressed-tensors ships, found without importing it."""
    spec = importlib.util.find_spec("compressed_tensors")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "transform" / "utils" / "hadamards.safetensors"


@functools.cache
def _table_orders() -> frozenset[int]:
    with safe_open(_table(), framework="pt") as file:
        return frozenset(map(int, file.keys()))


def _characters(q: int) -> Tensor:
    """``Q[a, b]``: 0 for a = b, 1 where a - b is another square of the field, or -1.

    The elements of a field of p^k are the polynomials in t of degree less than k over the integers
    modulo p, numbered by their coefficients as digits to base p, the constant last.
    """
    found = _prime_and_exponent(q)
    assert found is not None
    p, k = found
    character_q = torch.full((q,), -1.0, dtype=torch.float64)
    character_q[_powers(p, k)[::2]] = 1.0
    character_q[0] = 0.0
    numbers_q, differences_qq = torch.arange(q), torch.zeros(q, q, dtype=torch.int64)
    for place in (p**i for i in range(k)):
        digits_q = numbers_q // place % p
        differences_qq += (digits_q[:, None] - digits_q) % p * place
    return character_q[differences_qq]


@functools.lru_cache(maxsize=4096)
def _prime_and_exponent(q: int) -> tuple[int, int] | None:
    """The prime p and the exponent k with q = p^k, if there are such."""
    if q < 2:
        return None
    p = next((n for n in range(2, math.isqrt(q) + 1) if q % n == 0), q)
    k = 0
    while q % p == 0:
        q, k = q // p, k + 1
    return (p, k) if q == 1 else None


def _powers(p: int, k: int) -> list[int]:
    """The powers 0 to p^k - 2 of a generator of the field of p^k elements.

    They are those of t with t^k a polynomial of lower degree: if t has order p^k - 1, they are all
    elements of a field but 0. For k = 1 it is the generator itself.
    """
    places = [p**i for i in reversed(range(k))]
    for remainder in itertools.product(range(p), repeat=k):
        elements, x = [1], 0
        while remainder[-1] and x != 1:
            lead, low = divmod(elements[-1], places[0])
            x = sum(
                (low * p // place % p + lead * digit) % p * place
                for place, digit in zip(places, remainder, strict=True)
            )
            elements.append(x)
        if len(elements) == p**k:  # the last is 1 again
            return elements[:-1]
    raise AssertionError(f"a field of {p**k} elements has a generator")
