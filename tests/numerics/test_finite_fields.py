# SPDX-License-Identifier: Apache-2.0
"""Powers of a generator run through a field once."""

from __future__ import annotations

import pytest

from llmcompressor.numerics.hadamard import is_prime_power, power_of_prime, powers


@pytest.mark.parametrize("q", [3, 7, 8, 9, 25, 27, 81, 125, 343, 729])
def test_powers_are_all_elements_but_zero(q: int) -> None:
    elements, number = powers(q)
    assert sorted(elements) == list(range(1, q))
    assert all(elements[number.log[x]] == x for x in elements)


@pytest.mark.parametrize("q", [9, 25, 27])
def test_multiplication_distributes(q: int) -> None:
    """g (a - b) = g a - g b: what the generator's powers multiply by is linear."""
    elements, number = powers(q)

    def times_g(x: int) -> int:
        return elements[(number.log[x] + 1) % (q - 1)] if x else 0

    for a in range(q):
        for b in range(q):
            assert times_g(number.minus(a, b)) == number.minus(times_g(a), times_g(b))


def test_which_numbers_are_orders() -> None:
    assert power_of_prime(729) == (3, 6)
    assert not any(map(is_prime_power, [-1, 0, 1, 6, 12, 45, 728]))
