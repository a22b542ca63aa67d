# SPDX-License-Identifier: Apache-2.0
"""Finite fields: the powers of a generator, and which elements are squares.

The elements of a field of p^k are the polynomials in t of degree less than k over the integers
modulo p, numbered by their coefficients as digits to base p, the constant last.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field

__all__ = ["Numbering", "is_prime", "is_prime_power", "power_of_prime", "powers"]


@dataclass(frozen=True)
class Numbering:
    """How elements are numbered."""

    p: int
    k: int
    log: dict[int, int] = field(default_factory=dict)
    """element → the exponent of the generator."""

    def minus(self, first: int, second: int) -> int:
        """The difference of two elements."""
        total, place = 0, 1
        for _ in range(self.k):
            total += (first - second) % self.p * place
            first, second, place = first // self.p, second // self.p, place * self.p
        return total


def is_prime(q: int) -> bool:
    """Whether the integers modulo q are a field.

    >>> [q for q in range(12) if is_prime(q)]
    [2, 3, 5, 7, 11]
    """
    return power_of_prime(q) == (q, 1)


def is_prime_power(q: int) -> bool:
    """Whether there is a field of q elements.

    >>> [q for q in range(30) if is_prime_power(q)]
    [2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29]
    """
    return power_of_prime(q) is not None


@functools.lru_cache(maxsize=4096)
def power_of_prime(q: int) -> tuple[int, int] | None:
    """The prime p and the exponent k with q = p^k, if there are such."""
    if q < 2:
        return None
    p = next((n for n in range(2, math.isqrt(q) + 1) if q % n == 0), q)
    k = 0
    while q % p == 0:
        q, k = q // p, k + 1
    return (p, k) if q == 1 else None


@functools.lru_cache(maxsize=4)
def powers(q: int) -> tuple[list[int], Numbering]:
    """The powers 0 to q - 2 of a generator of the field of q elements, with their logarithms."""
    found = power_of_prime(q)
    assert found is not None
    p, k = found
    for remainder in itertools.product(range(p), repeat=k):
        elements = _orbit(p, k, remainder)
        if len(elements) == q - 1:
            return elements, Numbering(p, k, {x: e for e, x in enumerate(elements)})
    raise AssertionError(f"a field of {q} elements has a generator")


def _orbit(p: int, k: int, remainder: tuple[int, ...]) -> list[int]:
    """The powers of t until one is 1 again, with t^k = ``remainder`` (leading digit first).

    For k = 1 the generator tried is the remainder itself. Only if t has order p^k - 1 are they all
    elements of a field but 0, whatever the remainder.
    """
    if remainder[-1] == 0:
        return []
    top = p ** (k - 1)
    places = [p**i for i in reversed(range(k))]
    elements, x = [], 1
    while True:
        elements.append(x)
        lead, low = divmod(x, top)
        shifted = low * p
        x = sum(
            ((shifted // place) % p + lead * r) % p * place
            for place, r in zip(places, remainder, strict=True)
        )
        if x == 1:
            return elements
