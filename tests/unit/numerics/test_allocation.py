# SPDX-License-Identifier: Apache-2.0
"""The choice of options within a number of bytes: as good as trying all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from llmcompressor.numerics.allocation import (
    Choice,
    choose_options,
    size_range,
    smallest_choice,
)


def _by_trial(sizes, losses, limit: int) -> float | None:
    totals = [
        sum(one[place] for one, place in zip(losses, picked, strict=True))
        for picked in itertools.product(*(range(len(one)) for one in sizes))
        if sum(one[place] for one, place in zip(sizes, picked, strict=True)) <= limit
    ]
    return min(totals, default=None)


def _case(seed: int) -> tuple[list[list[int]], list[list[float]]]:
    dice = random.Random(seed)
    counts = [dice.randint(1, 4) for _ in range(dice.randint(1, 6))]
    top = dice.choice([6, 1000, 10**12])  # sums that often meet, and sums that never do
    sizes = [[dice.randint(0, top) for _ in range(count)] for count in counts]
    losses = [
        [dice.choice([dice.random(), float(dice.randint(0, 3))]) for _ in one] for one in sizes
    ]
    return sizes, losses


@pytest.mark.parametrize("seed", range(60))
def test_no_other_choice_within_the_limit_has_less_loss(seed: int) -> None:
    sizes, losses = _case(seed)
    least, most = size_range(sizes)
    dice = random.Random(seed)
    for limit in (least - 1, least, most, *(dice.randint(least, most) for _ in range(6))):
        found, expected = choose_options(sizes, losses, limit), _by_trial(sizes, losses, limit)
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert found.loss == pytest.approx(expected, rel=1e-9)
        assert found.bytes <= limit
        picked = list(zip(sizes, losses, found.options, strict=True))
        assert found.bytes == sum(one[place] for one, _, place in picked)
        assert found.loss == pytest.approx(sum(one[place] for _, one, place in picked))


@pytest.mark.parametrize("seed", range(40))
def test_no_smaller_choice_loses_as_little(seed: int) -> None:
    sizes, losses = _case(seed)
    least, most = (sum(end(one) for one in losses) for end in (min, max))
    for share in (0.0, 0.2, 0.5, 0.9, 1.0):
        limit = (least + (most - least) * share) * (1 + 1e-9)
        found = smallest_choice(sizes, losses, limit)
        picked = (
            sum(one[place] for one, place in zip(sizes, each, strict=True))
            for each in itertools.product(*(range(len(one)) for one in sizes))
            if sum(one[place] for one, place in zip(losses, each, strict=True)) <= limit
        )
        assert found is not None
        assert found.bytes == min(picked)
        assert found.loss <= limit
        assert found == choose_options(sizes, losses, found.bytes)
    assert smallest_choice(sizes, losses, least - 1e-3) is None


def test_hundreds_of_parts_have_one_answer() -> None:
    dice = random.Random(0)
    shapes = [dice.randint(1, 9) * 4096 + 16 for _ in range(4)]
    sizes = [[bits * shapes[part % 4] // 8 for bits in (2, 3, 4, 8)] for part in range(320)]
    losses = [[dice.random() * 4.0**-bits for bits in (2, 3, 4, 8)] for _ in sizes]
    limit = sum(one[2] for one in sizes)
    found = choose_options(sizes, losses, limit)
    assert found is not None
    assert found.bytes <= limit
    assert found.loss < sum(one[2] for one in losses)
    assert found == choose_options(sizes, losses, limit)


def test_of_equal_losses_the_smaller_one_is_taken() -> None:
    assert choose_options([[8, 4]], [[1.0, 1.0]], 8) == Choice((1,), 4, 1.0)
