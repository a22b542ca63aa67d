# SPDX-License-Identifier: Apache-2.0
r"""Short sequences of signs from which Hadamard matrices of order 4 t w are put together.

- Four T-sequences of length t: entries 0 and ±1, at each place one of the four not 0, the sum of
  their aperiodic autocorrelations 0 at every shift but 0. Of two pairs of sequences (A, B) and (C,
  D) whose autocorrelations cancel, with lengths m and n, they are (A ± B) / 2 followed by n zeros
  and m zeros followed by (C ± D) / 2. Golay pairs are such pairs; Turyn-type sequences X, Y, Z, W
  give the pairs (Z W, Z -W) and (X, Y), base sequences are such pairs together.
- Four Williamson sequences of length w: symmetric, entries ±1, the sum of their periodic
  autocorrelations 0 at every shift but 0. w = (q + 1) / 2 with q = 1 mod 4 a power of a prime has
  them (Turyn); those of other lengths are stored.

Turyn, J. Combin. Theory A 12 (1972) and 16 (1974); Kharaghani and Tayfeh-Rezaie, J. Combin. Des. 13
(2005), whose X, Y, Z, W are those of length 36; Best, Djokovic, Kharaghani and Ramp,
arXiv:1206.4107, whose those of the other lengths are.
"""

from __future__ import annotations

import functools
import itertools

from llmcompressor.numerics.finite_fields import is_prime_power, powers

__all__ = ["has_t_sequences", "has_williamson", "t_sequences", "williamson"]

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
