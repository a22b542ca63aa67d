# SPDX-License-Identifier: Apache-2.0
r"""Hadamard matrices: n x n, entries ±1, :math:`H H^\top = n I`.

How each order is reached (n is 1, 2 or a multiple of 4):

==================  ============================================================================
Sylvester           n = 2^k: the Kronecker power of [[1, 1], [1, -1]]
Paley I             n = q + 1, q = 3 mod 4: from the quadratic character of a field of q elements
Paley II            n = 2 (q + 1), q = 1 mod 4
Goethals-Seidel     n = 4 m: four circulants whose squares sum to n I, for 13 primes m; for seven
                    orders with a border
Kronecker product   n = a b of two of these
Cooper-Wallis       n = 4 t w: T-matrices of order t and Williamson sequences of length w
Miyamoto            n = 4 q, q = 1 mod 4: from a matrix of order q - 1;
                    n = 8 q, q = 3 mod 4: from one of order 2 (q - 1), of a certain form
==================  ============================================================================

q is a power of a prime. Together they reach every multiple of 4 up to 2000, most above, and 2^k
times each. Paley, J. Math. Phys. 12 (1933); Goethals and Seidel, J. Austral. Math. Soc. 11 (1970),
where the arrays stand; Cooper and J. Wallis, Bull. Austral. Math. Soc. 7 (1972); Miyamoto, J.
Combin. Theory A 57 (1991).

Legend: N order; B the part that is no power of two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = [
    "Numbering",
    "bordered",
    "characters",
    "circulants",
    "cooper_wallis",
    "fast_hadamard",
    "four_rows",
    "goethals_seidel",
    "goethals_seidel_array",
    "hadamard",
    "has_bordered",
    "has_circulants",
    "has_hadamard",
    "has_t_circulants",
    "has_t_sequences",
    "has_williamson",
    "is_prime",
    "is_prime_power",
    "miyamoto_4",
    "miyamoto_8",
    "paired_paley",
    "paley_1",
    "paley_2",
    "power_of_prime",
    "powers",
    "random_hadamard",
    "random_orthogonal",
    "split_order",
    "sylvester",
    "symmetric_paley",
    "t_circulants",
    "t_sequences",
    "usable_block_sizes",
    "williamson",
]


# --------------------
# First rows of circulants that are constant on the orbits of a multiplier.
#
# A multiplier u of the integers modulo m takes x to u x; its orbits are x, u x, u² x, ... The
# periodic autocorrelation of a row that is constant on them is constant on them, too, so there are
# fewer numbers that four rows have to bring to 0 together than m / 2. Such rows are found by
# drawing many whose autocorrelation is small, and looking for two whose sum is the negative of
# that of two others (supplementary difference sets, in other words).
#
# The rows of order 251 are Djokovic, Golubitsky and Kotsireas's, J. Combin. Des. 22 (2014); those
# of order 223, 283, 311, 487 and 491 are Alpöge, Voinov and Reynolds-Haertle's, who announced them
# in 2026. Djokovic's papers from 1992 on have the method.

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


# --------------------
# Finite fields: the powers of a generator, and which elements are squares.
#
# The elements of a field of p^k are the polynomials in t of degree less than k over the integers
# modulo p, numbered by their coefficients as digits to base p, the constant last.


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


# --------------------
# Short sequences of signs from which Hadamard matrices of order 4 t w are put together.
#
# - Four T-sequences of length t: entries 0 and ±1, at each place one of the four not 0, the sum of
# their aperiodic autocorrelations 0 at every shift but 0. Of two pairs of sequences (A, B) and (C,
#   D) whose autocorrelations cancel, with lengths m and n, they are (A ± B) / 2 followed by n zeros
#   and m zeros followed by (C ± D) / 2. Golay pairs are such pairs; Turyn-type sequences X, Y, Z, W
#   give the pairs (Z W, Z -W) and (X, Y), base sequences are such pairs together.
# - Four Williamson sequences of length w: symmetric, entries ±1, the sum of their periodic
#   autocorrelations 0 at every shift but 0. w = (q + 1) / 2 with q = 1 mod 4 a power of a prime has
#   them (Turyn); those of other lengths are stored.
#
# Turyn, J. Combin. Theory A 12 (1972) and 16 (1974); Kharaghani and Tayfeh-Rezaie, J. Combin. Des.
# 13 (2005), whose X, Y, Z, W are those of length 36; Best, Djokovic, Kharaghani and Ramp,
# arXiv:1206.4107, whose those of the other lengths are.

Sequence = list[int]

_GOLAY = {
    1: ("+", "+"),
    2: ("++", "+-"),
    10: ("++-+-+--++", "++-+++++--"),
    26: ("++++-++--+-+-+--+-+++--+++", "++++-++--+-+++++-+---++---"),
}
"""length → a pair that is no product of shorter ones."""

_BASE = {
    7: ("+++-", "+--+", "+++", "+-+"),
    13: ("++-+-++", "++---+-", "+++++-", "++--+-"),
    15: ("+++--+-+", "+-+--++-", "++++++-", "++---+-"),
}
"""t → A, B, C, D."""

_TURYN_TYPE = {
    23: "06e5c4d1",
    29: "0001f4a961",
    35: "0004f90bc961",
    47: "0000778e52de5561",
    59: "000038e2739c7a0b6951",
    71: "00000b7c2cb2bc4b6cd9a961",
    83: "0000067cde3e50639ab46135aa51",
    89: "000000f70b106f9d427a25e9a96951",
    107: "060989975b685d8fc80750b21c0212eceb26",
    113: "05128f55401f041adf7f65c53567822c9cb9c1",
}
"""t → a digit a place: bits of X, Y, Z and W, one for -1; the last without W, which is shorter."""

_WILLIAMSON = {
    11: (0x787, 0x5CE, 0x532, 0x484),
    17: (0x1F18F, 0x1D99B, 0x185A1, 0x1524A),
}
"""w → four sequences, as w bits with a one for +1."""


def has_t_sequences(t: int) -> bool:
    """Whether :func:`t_sequences` makes some of this length."""
    return t in _BASE or t in _TURYN_TYPE or _golay_sum(t) is not None


def has_williamson(w: int) -> bool:
    """Whether :func:`williamson` makes some of this length."""
    return w in (1, *_WILLIAMSON) or (w % 2 == 1 and is_prime_power(2 * w - 1))


def t_sequences(t: int) -> list[Sequence]:
    """Four T-sequences of length t."""
    a, b, c, d = _complementary(t)
    left, right = [0] * len(a), [0] * len(c)
    return [
        [(x + y) // 2 for x, y in zip(a, b, strict=True)] + right,
        [(x - y) // 2 for x, y in zip(a, b, strict=True)] + right,
        left + [(x + y) // 2 for x, y in zip(c, d, strict=True)],
        left + [(x - y) // 2 for x, y in zip(c, d, strict=True)],
    ]


def williamson(w: int) -> list[Sequence]:
    """Four Williamson sequences of length w."""
    if w == 1:
        return [[1]] * 4
    if w in _WILLIAMSON:
        return [[2 * int(bit) - 1 for bit in f"{row:0{w}b}"] for row in _WILLIAMSON[w]]
    first, second = _turyn(2 * w - 1)
    return [[1, *first[1:]], [-1, *first[1:]], second, second]


# ---------------------------------------------------------------------- T-sequences


def _complementary(t: int) -> tuple[Sequence, Sequence, Sequence, Sequence]:
    """A, B, C, D with t the lengths of A and C together."""
    if t in _BASE:
        a, b, c, d = (_signs(text) for text in _BASE[t])
        return a, b, c, d
    if t in _TURYN_TYPE:
        places = [f"{int(digit, 16):04b}" for digit in _TURYN_TYPE[t][:-1]]
        places.append(f"{int(_TURYN_TYPE[t][-1], 16):03b}")
        columns = itertools.zip_longest(*places)
        x, y, z, w = ([1 - 2 * int(bit) for bit in row if bit] for row in columns)
        return z + w, z + [-sign for sign in w], x, y
    lengths = _golay_sum(t)
    assert lengths is not None
    return *_golay(lengths[0]), *_golay(lengths[1])


@functools.cache
def _golay_sum(t: int) -> tuple[int, int] | None:
    """Two lengths of Golay pairs whose sum is t."""
    return next(((m, t - m) for m in range(1, t) if _is_golay(m) and _is_golay(t - m)), None)


def _is_golay(length: int) -> bool:
    """Whether the length is 2^a 10^b 26^c."""
    twos = (length & -length).bit_length() - 1
    rest = length >> twos
    for prime in (5, 13):
        while rest % prime == 0:
            rest, twos = rest // prime, twos - 1
    return rest == 1 and twos >= 0


def _golay(length: int) -> tuple[Sequence, Sequence]:
    """A Golay pair: the product of one of a prime length and one of the rest (Turyn)."""
    if length in _GOLAY:
        a, b = (_signs(text) for text in _GOLAY[length])
        return a, b
    part = next(n for n in (26, 10, 2) if length % n == 0 and _is_golay(length // n))
    (a, b), (c, d) = _golay(part), _golay(length // part)
    total = [(x + y) // 2 for x, y in zip(c, d, strict=True)]
    less = [(x - y) // 2 for x, y in zip(c, d, strict=True)]
    pairs = list(zip(total, less, strict=True))
    return (
        [s * x + r * y for s, r in pairs for x, y in zip(a, b[::-1], strict=True)],
        [s * y - r * x for s, r in pairs for x, y in zip(a[::-1], b, strict=True)],
    )


def _signs(text: str) -> Sequence:
    return [1 if sign == "+" else -1 for sign in text]


# ---------------------------------------------------------------------- Williamson sequences


def _turyn(q: int) -> tuple[Sequence, Sequence]:
    """Two symmetric sequences of length w whose autocorrelations sum to 0, the first 0 at 0.

    With g a generator of the field of q² elements, s(d) = χ((g^(dq) - g^d) / δ) makes a negacyclic
    conference matrix of order 2 w; δ^q = -δ brings the difference into the field of q elements. Its
    entries at even and at odd shifts, with alternating signs, make two circulants.
    """
    elements, number = powers(q * q)
    w = (q + 1) // 2  # of δ the exponent, too

    def s(d: int) -> int:
        d %= q * q - 1
        first, second = elements[d * q % (q * q - 1)], elements[d]
        difference = number.minus(first, second)
        if difference == 0:
            return 0
        return 1 - 2 * ((number.log[difference] - w) // (q + 1) % 2)

    sign = [1 - 2 * (k % 2) for k in range(w)]
    return [sign[k] * s(2 * k) for k in range(w)], [sign[k] * s(2 * k + w) for k in range(w)]


# --------------------
# Constructions of Hadamard matrices: Sylvester, Paley, Goethals-Seidel, Cooper-Wallis.
#
# :mod:`llmcompressor.numerics.hadamard` says which order is made how. All matrices are float64.
#
# Legend: N order; Q the quadratic character of the differences of a field's elements.


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


# --------------------
# Hadamard matrices that are the array of Goethals and Seidel with a border.
#
# The four blocks are indexed by an abelian group G: entry (g, h) is a function of h - g. Their
# squares need not sum to a multiple of I, only to one less a matrix that is constant on the cosets
# of a subgroup. Columns that are constant on the cosets make up for it; so do rows. The corner is
# what makes these orthogonal to the others.
#
# All are Alpöge, Voinov and Reynolds-Haertle's, who announced in 2026 matrices of the twelve
# orders up to 2000 for which none was known (:mod:`llmcompressor.numerics.hadamard` has the other
# five, which need no border).


@dataclass(frozen=True)
class _Bordered:
    shape: tuple[int, ...]
    """G as a product of cyclic groups."""

    cosets: tuple[int, ...]
    """Elements equal modulo these lie in one coset."""

    multiplier: int
    text: str
    """The four functions, as in :func:`llmcompressor.numerics.hadamard.four_rows`."""

    rows: str
    columns: str
    """A line of the border after another, a bit for each coset of each block, one for -1."""


_BORDERED = {
    668: _Bordered(
        shape=(166,),
        cosets=(1,),
        multiplier=1,
        text=(
            "666f1b0f093ea1f9523b25aae9459c6bdff7dea8d70488c05a5fe87725263f1cf184f7ba11b6ed5cb2b999"
            "0e4f0f6c15e06adc0da5516ba639420082151688488c05a5fe8772526271cf184f7ba11b6ed5cb2b"
        ),
        rows="fac9",
        columns="8421",
    ),
    716: _Bordered(
        shape=(178,),
        cosets=(1,),
        multiplier=1,
        text=(
            "1bb777bb1bdf412281c02f79ee1b0c39afca6f961878a9d581b59aac6bfadc10a26744d372d96f95706768"
            "70ae4488844e420bedd7e3fd08a11e4f3c650359069e78503c581b59aac6bfadc10a2e744d372d96f95706"
            "76870a"
        ),
        rows="fac9",
        columns="8421",
    ),
    1388: _Bordered(
        shape=(2, 3, 57),
        cosets=(2, 3, 1),
        multiplier=7,
        text=(
            "9957e2e0c95b235e1ca03e2e0db09b1bd7386c4643e180670442bdb3edcb6938f056b3cdf00b3068d2c3d9"
            "dafcd3054743328a0e3d53a24dea947c3df80033"
        ),
        rows=(
            "6744dc2e66a364ba9a2d9553355a69595cb234ed3458e6594e5b156ac96a4da8e569372c569666572d0b3a"
            "9c8d3b2a567383b17071c71dc38e1e31f8"
        ),
        columns=(
            "6719652ceb2c65c2cb2e36593693965b238d356c9558da554e5c8e6ac5b14da556693ab272695a70b4ec3b"
            "4666399d0b55573856ae231f88f81c71e3"
        ),
    ),
    1436: _Bordered(
        shape=(2, 2, 8, 11),
        cosets=(2, 2, 2, 1),
        multiplier=3,
        text=(
            "7f9fc3a5a2c3b68ba5a43ab4b16f96ac3b96f96a2d2cb23cb162a5ac3e0bf78b7828fb6da34af0f2d22dac"
            "3a1e3f8078"
        ),
        rows=(
            "ac1d95a98ec94b87d21747d19aa3b11b6c272b4d7259396374e1c535554ee18b33b4598d69b82793c36a17"
            "2d99d4a3650f3ac971a5c61d53c6f0acc93a668ea3b4aa72e16accd259b85a6c1d4e967427d43c9a17c965"
            "78b1598b9cc52753b295e193ca2b178d2e391d71564ba32de447"
        ),
        columns=(
            "2eaa2db84ecc56e4369672934bc32b8759995c9a71f063e835a51dc56c63744b3a5c394e782d6a3565564d"
            "36471d27591b721e71172b532e72878e6a5c93b17456e8c9532bc5d13963b8b4272d9aca4d1de4a61e6671"
            "9a9c5a36c58d3c5987a3692e93d20f35e8e2334be4d4554eb8a9"
        ),
    ),
    1676: _Bordered(
        shape=(418,),
        cosets=(1,),
        multiplier=49,
        text="9a0f8f7194de6af1009b43f0452ee5ffbf03065284",
        rows="fac9",
        columns="8421",
    ),
    1772: _Bordered(
        shape=(442,),
        cosets=(1,),
        multiplier=55,
        text="9ca819dc036853ecd2831f7179fe404df27120cabf8f663769",
        rows="fac9",
        columns="8421",
    ),
    1916: _Bordered(
        shape=(2, 2, 119),
        cosets=(2, 2, 1),
        multiplier=13,
        text=(
            "7b31c4a1df69598d340d4a3ae6ac1e24d31b4749dce8973234fcac4e9413287af4f2a139ed98217394eccc"
            "1126f816c7b545aebd888876c5408bb2f53227f855"
        ),
        rows="55c95ac6533c5c3335663a6933933c9c665566aa695a69a5",
        columns="5a535aac55695596363a36c5393539ca6c5c6ca363666399",
    ),
}


def has_bordered(order: int) -> bool:
    """Whether :func:`bordered` makes one of this order."""
    return order in _BORDERED


def bordered(order: int) -> Tensor:
    """A Hadamard matrix of this order, float64."""
    found = _BORDERED[order]
    core = _core(found)
    coset = _coset_of(found)
    rows, columns = _lines(found.rows, coset), _lines(found.columns, coset).T
    corner = -rows @ core.T @ columns / len(core)
    return torch.cat([torch.cat([corner, rows], 1), torch.cat([columns, core], 1)])


def _core(found: _Bordered) -> Tensor:
    elements = torch.cartesian_prod(*map(torch.arange, found.shape)).reshape(-1, len(found.shape))
    places = torch.tensor([math.prod(found.shape[i + 1 :]) for i in range(len(found.shape))])

    def number(element: Tensor) -> Tensor:
        return (element % torch.tensor(found.shape) * places).sum(-1)

    difference = number(elements - elements[:, None])
    size = math.prod(found.shape)
    values = torch.tensor(four_rows(size, found.shape[-1], found.multiplier, found.text)).double()
    reversal = torch.eye(size, dtype=torch.float64)[number(-elements)]
    return goethals_seidel_array([row[difference] for row in values], reversal)


def _coset_of(found: _Bordered) -> Tensor:
    """The number of each element's coset."""
    numbers = torch.zeros(1, dtype=torch.int64)
    for order, cosets in zip(found.shape, found.cosets, strict=True):
        numbers = (numbers[:, None] * cosets + torch.arange(order) % cosets).flatten()
    return numbers


def _lines(text: str, coset: Tensor) -> Tensor:
    """Lines of the border, over the elements of the four blocks."""
    bits = [int(bit) for digit in text for bit in f"{int(digit, 16):04b}"]
    signs = 1 - 2 * torch.tensor(bits, dtype=torch.float64)
    return signs.reshape(-1, 4, int(coset.max()) + 1)[..., coset].flatten(1)


# --------------------
# Hadamard matrices of order 4 q and 8 q, q a power of a prime, from one K of about half as much.
#
# Let U be Q, the quadratic character of the differences of a field of q elements, without the row
# and the column of 0, the a with Q[0, a] = 1 before the others: two halves. Then
#
# .. math:: U U^\top = q I - 2 \begin{pmatrix} J & 0 \\ 0 & J \end{pmatrix}
#
# with J all ones, and U has a zero diagonal. For U₂ made of U and a V with V Vᵀ = c I whose
# entries are ±1 where U₂ is 0, and 0 elsewhere, the core
#
# .. math:: T = U_2 \otimes \begin{pmatrix} 1 & 1 \\ 1 & 1 \end{pmatrix}
#             + V \otimes \begin{pmatrix} 1 & -1 \\ -1 & 1 \end{pmatrix}
#
# has entries ±1, and T Tᵀ is a multiple of I less a constant in each of as many blocks of order q
# - 1 as rows and columns are missing. Columns that are constant on the blocks make up for it; so
# do rows, as the rows of U sum to 0 over one half and to 1 or -1 over the other.
#
# - 4 q, q = 1 mod 4: U₂ is U twice along the diagonal, V = [[I, K], [-Kᵀ, I]], K of order q - 1.
# - 8 q, q = 3 mod 4: U₂ is [[U, U], [U, -U]] twice, V = [[R, K], [-R Kᵀ R / 2, R]], where R is
#   [[I, I], [-I, I]] and K, of order 2 q - 2, is paired: rows i and i + q - 1 and columns j and
#   j + q - 1 make a Hadamard matrix of order 2, for every i and j. R Kᵀ R / 2 has entries ±1 then.
#
# Miyamoto, J. Combin. Theory A 57 (1991), for 4 q; Seberry and Yamada in Contemporary Design
# Theory (1992) for what it leads to.


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


# --------------------
# Hadamard matrices: n x n, entries ±1, :math:`H H^\top = n I`.

_Make = Callable[[], Tensor]


def hadamard(order: int) -> Tensor:
    """A Hadamard matrix, float64 ``[N, N]``; deterministic for each order.

    Raises:
        ValueError: no matrix of this order is known here (:func:`has_hadamard`).

    >>> hadamard(4).int().tolist()
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    """
    power, base = split_order(order)
    return torch.kron(sylvester(power), _base(base))


def has_hadamard(order: int) -> bool:
    """Return True if :func:`hadamard` supports this order.

    >>> [n for n in range(1, 21) if has_hadamard(n)]
    [1, 2, 4, 8, 12, 16, 20]
    """
    return _split(order) is not None


def split_order(order: int) -> tuple[int, int]:
    """Factor ``order`` into the largest power of two and the smallest other supported order.

    Raises:
        ValueError: no matrix of this order is known here.

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


def random_hadamard(order: int, generator: torch.Generator) -> Tensor:
    """diag(s) H with random signs s, float64 ``[N, N]``.

    Args:
        order: N.
        generator: on the CPU; equal seeds give equal matrices.

    Raises:
        ValueError: as :func:`hadamard`.
    """
    signs_N = torch.randint(0, 2, (order,), generator=generator).double() * 2 - 1
    return signs_N[:, None] * hadamard(order)


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
    """Multiply by ``diag(signs) hadamard(N)`` along the last dimension N.

    This takes N (log2 + B) steps per row instead of N². The power of two is computed by butterflies
    (the Walsh-Hadamard transform), the rest as a product.

    Args:
        x: ``[..., N]``, floating dtype; not changed.
        signs_N: 1 or -1 for each element, ``[N]``; all are 1 if ``None``.

    Raises:
        ValueError: as :func:`hadamard`.

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
        _add_and_subtract_(pairs.select(-3, 0), pairs.select(-3, 1))
        half //= 2
    return y.flatten(-2)


def _add_and_subtract_(first: Tensor, second: Tensor) -> None:
    """A butterfly step in place, with one temporary of half the size."""
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
    """The constructor of a matrix of this order, a multiple of 4, without a power-of-two factor."""
    return next((made for way in _WAYS if (made := way(base)) is not None), None)


@functools.lru_cache(maxsize=8)
def _base(order: int) -> Tensor:
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    make = _maker(order)
    assert make is not None
    return make()


def _paley(base: int) -> _Make | None:
    if is_prime_power(base - 1):  # 3 mod 4, as base is a multiple of 4
        return functools.partial(paley_1, base - 1)
    half = base // 2 - 1
    return functools.partial(paley_2, half) if half % 4 == 1 and is_prime_power(half) else None


def _goethals_seidel(base: int) -> _Make | None:
    if has_bordered(base):
        return functools.partial(bordered, base)
    return functools.partial(goethals_seidel, base // 4) if has_circulants(base // 4) else None


def _product(base: int) -> _Make | None:
    for factor in range(12, math.isqrt(base) + 1, 4):
        other = base // factor
        if base % factor == 0 and other % 4 == 0 and _maker(factor) and _maker(other):
            return lambda: torch.kron(_base(factor), _base(other))
    return None


def _cooper_wallis(base: int) -> _Make | None:
    length = base // 4
    for w in range(1, length, 2):
        t = length // w
        if length % w == 0 and has_williamson(w) and (has_t_circulants(t) or has_t_sequences(t)):
            return functools.partial(cooper_wallis, t, w)
    return None


def _miyamoto_4(base: int) -> _Make | None:
    q = base // 4
    if q % 4 == 1 and is_prime_power(q) and has_hadamard(q - 1):
        return lambda: miyamoto_4(q, hadamard(q - 1))
    return None


def _miyamoto_8(base: int) -> _Make | None:
    q = base // 8
    if base % 8 or q % 4 != 3 or not is_prime_power(q):
        return None
    make = _paired(q - 1)
    return None if make is None else functools.partial(_miyamoto_8_of, q, make)


def _miyamoto_8_of(q: int, make: _Make) -> Tensor:
    return miyamoto_8(q, make())


def _paired(half: int) -> _Make | None:
    """The constructor of a paired matrix of order 2 ``half``, an odd multiple of 4."""
    if is_prime(2 * half - 1):
        return functools.partial(paired_paley, 2 * half - 1)
    q = half // 2
    if q % 4 != 1 or not is_prime_power(q) or not has_hadamard(q - 1):
        return None
    power, base = split_order(q - 1)
    if base == 1:
        return lambda: miyamoto_4(q, sylvester(power))
    if is_prime(base - 1):
        return lambda: miyamoto_4(q, torch.kron(sylvester(power), symmetric_paley(base - 1)))
    return None


_WAYS = (_paley, _goethals_seidel, _product, _cooper_wallis, _miyamoto_4, _miyamoto_8)
