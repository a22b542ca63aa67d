# SPDX-License-Identifier: Apache-2.0
r"""First rows of circulants that are constant on the orbits of a multiplier.

A multiplier u of the integers modulo m takes x to u x; its orbits are x, u x, u² x, ... The
periodic autocorrelation of a row that is constant on them is constant on them, too, so there are
fewer numbers that four rows have to bring to 0 together than m / 2. Such rows are found by drawing
many whose autocorrelation is small, and looking for two whose sum is the negative of that of two
others (supplementary difference sets, in other words).

The rows of order 251 are Djokovic, Golubitsky and Kotsireas's, J. Combin. Des. 22 (2014); those of
order 223, 283, 311, 487 and 491 are Alpöge, Voinov and Reynolds-Haertle's, who announced them in
2026. Djokovic's papers from 1992 on have the method.
"""

from __future__ import annotations

__all__ = [
    "circulants",
    "four_rows",
    "has_circulants",
    "has_t_circulants",
    "t_circulants",
]

Row = list[int]

_CIRCULANTS: dict[int, tuple[int, str]] = {
    103: (46, "0d0a2e0eb4dd0e3daf948372aa956c04147"),
    127: (2, "7e2a8939c278f52c145"),
    151: (8, "61f4a0ea29ebd118042778de60bd964"),
    163: (38, "228a6b795584cba554a"),
    191: (39, "894a0cf95f4033f001b44c287f32258fd2aacd6"),
    223: (39, "fe9a0285240f01566e81f893fa41bbe60be744e055d75c143318399ea2dc24daac1ae927487"),
    239: (10, "1d0b709e6150e15a67366d9eb8f68ac8049"),
    251: (20, "fd0e5616e551774a99283efae79bd5ab3c1d2b244269fe9a7d0"),
    283: (
        44,
        "03d7a8e95b01a2cc979dfe7ec73954944cc25b4636c2110e229810aee11bae653f7280e0176b120a78f2"
        "00059dbddd5",
    ),
    311: (6, "4cfb1f0c0db125d7b0581f854b2078d42a0a34528e8471bd332ae651d95ee2e"),
    463: (33, "0bdd152003eae6c7b90ac47"),
    487: (41, "aab6e35c43c749edd074b0b34318f08c8b5b864b8e70ea7935742c0"),
    491: (138, "541f2b9c5a42c0e35a76c0d6a1d568873b6907fa9923ac8f80d9605dba5f1b760610867"),
}
"""m → u and, for each orbit in the order of least elements, a digit: a bit a row, one for -1."""

_T_CIRCULANTS: dict[int, tuple[int, str]] = {
    19: (7, "bADacCA"),
    43: (6, "AacaDDAbadBCcBC"),
    67: (29, "AadCBcCBAbADCAbADDcbdac"),
    73: (8, "AbbBdDDdcaDCccAaBcBCDaAAb"),
}
"""t → u and a letter for each orbit: which of the four rows is not 0 there, a capital for +1."""


def has_circulants(m: int) -> bool:
    """Whether :func:`circulants` makes some of this order."""
    return m in _CIRCULANTS


def has_t_circulants(t: int) -> bool:
    """Whether :func:`t_circulants` makes some of this order."""
    return t in _T_CIRCULANTS


def circulants(m: int) -> list[Row]:
    """Four rows, entries ±1, whose circulants have A Aᵀ + B Bᵀ + C Cᵀ + D Dᵀ = 4 m I."""
    return four_rows(m, m, *_CIRCULANTS[m])


def t_circulants(t: int) -> list[Row]:
    """Four rows, one of them ±1 at each place and the others 0, whose squares sum to t I.

    Their circulants are T-matrices.
    """
    letters = _spread(t, t, *_T_CIRCULANTS[t])
    return [[(one == row) - (one == row.lower()) for one in letters] for row in "ABCD"]


def four_rows(size: int, m: int, multiplier: int, text: str) -> list[Row]:
    """Four functions, entries ±1, on so many numbers.

    Args:
        size: a multiple of m; a number stands for its remainder and its quotient by m.
        m: of the multiplier, which acts on the remainder.
        multiplier: prime to m.
        text: for each orbit in the order of least elements a digit, a bit a row, one for -1.
    """
    digits = [int(digit, 16) for digit in _spread(size, m, multiplier, text)]
    return [[1 - 2 * (digit >> bit & 1) for digit in digits] for bit in (3, 2, 1, 0)]


def _spread(size: int, m: int, multiplier: int, text: str) -> list[str]:
    """The sign of its orbit for each number."""
    spread, signs = [""] * size, iter(text)
    for least in range(size):
        if spread[least]:
            continue
        x, sign = least, next(signs)
        while not spread[x]:
            spread[x] = sign
            x += x % m * multiplier % m - x % m
    return spread
