# SPDX-License-Identifier: Apache-2.0
r"""Circulants of prime order whose first rows are constant on cyclotomic classes.

With g the least primitive root of a prime m, class i of e is g^i, g^(i+e), g^(i+2e), ... modulo m.
The periodic autocorrelation of a row that is constant on the classes is constant on them, too. If a
class has an odd number of elements, -1 swaps classes i and i + e/2; so four rows have e/2 numbers
to bring to 0 together, not (m - 1) / 2. Such rows are found by drawing many whose autocorrelation
is small, and looking for two whose sum is the negative of that of two others.

Djokovic, Golubitsky and Kotsireas, J. Combin. Des. 22 (2014), whose the circulants of order 251
are; the method is that of Djokovic's papers from 1992 on.
"""

from __future__ import annotations

from llmcompressor.numerics.finite_fields import powers

__all__ = ["circulants", "has_circulants", "has_t_circulants", "t_circulants"]

Row = list[int]

_CIRCULANTS = {
    103: "0de39eae0cf04d50036892aa74d4d14ba27",
    127: "7e29f95187524283acc",
    151: "61e94e64a8dfb2186ed9ba40770021d",
    163: "228695c5a4a4a785b5b",
    191: "890ad5642cf07024b3a9f41f23385fa84dcc20f",
    239: "1de0998b7e5a818fbde5604c96a16637600",
    251: "fd1d2ae1509e1c285e9f953d79e97b26a572074afab6e4d436b",
    463: "0bd1e630ab4cad205e797c0",
}
"""m → a digit for 0, then for each class: bits of the four rows, one for -1."""

_T_CIRCULANTS = {
    19: "bADaCcA",
    43: "AaabCdCBABcaDDc",
    67: "AadBBCbADDcDcAbacbCCAAd",
    73: "AbDBbADBabdaCcCDadcBcAcDA",
}
"""t → a letter for 0, then for each class: which of the four rows is not 0, a capital for +1."""


def has_circulants(m: int) -> bool:
    """Whether :func:`circulants` makes some of this order."""
    return m in _CIRCULANTS


def has_t_circulants(t: int) -> bool:
    """Whether :func:`t_circulants` makes some of this order."""
    return t in _T_CIRCULANTS


def circulants(m: int) -> list[Row]:
    """The first rows of four circulants, entries ±1, whose squares A Aᵀ sum to 4 m I."""
    digits = [int(digit, 16) for digit in _spread(_CIRCULANTS[m], m)]
    return [[1 - 2 * (digit >> bit & 1) for digit in digits] for bit in (3, 2, 1, 0)]


def t_circulants(t: int) -> list[Row]:
    """The first rows of T-matrices: one of the four ±1 at each place, the squares sum to t I."""
    letters = _spread(_T_CIRCULANTS[t], t)
    return [[(one == row) - (one == row.lower()) for one in letters] for row in "ABCD"]


def _spread(text: str, m: int) -> list[str]:
    """A sign of ``text`` for each number modulo m: the first for 0, the others for the classes."""
    spread = [text[0]] * m
    for exponent, number in enumerate(powers(m)[0]):
        spread[number] = text[1 + exponent % (len(text) - 1)]
    return spread
