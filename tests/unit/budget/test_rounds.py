# SPDX-License-Identifier: Apache-2.0
"""The search among the points of a curve: as good as measuring all of them, in a few rounds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from llmcompressor.budget.rounds import Round, RoundSearch, best_round
from llmcompressor.numerics.allocation import choose_options, size_range

Measure = Callable[[float], float | None]
MODELS: dict[str, Measure] = {
    "as expected": lambda loss: loss,
    "a third of it": lambda loss: loss / 3,
    "four times as much": lambda loss: 4 * loss,
    "faster than expected": lambda loss: 30 * loss**1.5,
    "with a floor": lambda loss: 0.3 * loss + 0.002,
    "in steps": lambda loss: 0.01 * math.ceil(loss / 0.01),
    "no number above": lambda loss: None if loss > 0.08 else loss,
}


def _case(seed: int, sets: int = 7) -> tuple[list[list[int]], list[list[float]]]:
    dice = random.Random(seed)
    shapes = [dice.randint(1, 9) * 1000 + 16 for _ in range(sets)]
    sizes = [[bits * shape for bits in (3, 4, 8)] for shape in shapes]
    losses = [[dice.random() * 0.2 * 4.0**-bits for bits in (1, 2, 6)] for _ in shapes]
    return sizes, losses


def _curve(sizes: list[list[int]], losses: list[list[float]]) -> dict[int, float]:
    """Bytes → the least loss, of all points, by trying every choice."""
    best: dict[int, float] = {}
    for picked in itertools.product(range(3), repeat=len(sizes)):
        taken = sum(one[place] for one, place in zip(sizes, picked, strict=True))
        lost = sum(one[place] for one, place in zip(losses, picked, strict=True))
        best[taken] = min(lost, best.get(taken, math.inf))
    found: dict[int, float] = {}
    for taken in sorted(best):
        if best[taken] < min(found.values(), default=math.inf) * (1 - 1e-12):
            found[taken] = best[taken]
    return found


def _searched(search: RoundSearch, measure: Measure) -> list[Round]:
    made: list[Round] = []
    while (choice := search.following(made)) is not None:
        assert choice.bytes not in {one.bytes for one in made}, "made twice"
        kl = measure(choice.loss)
        made.append(Round(choice.options, choice.bytes, choice.loss, kl, choice.bytes + 100))
    return made


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_the_smallest_point_that_keeps_the_limit_is_found(model: str, seed: int) -> None:
    sizes, losses = _case(seed)
    curve, measure = _curve(sizes, losses), MODELS[model]
    for limit in (0.004, 0.02, 0.09, 50.0):
        made = _searched(RoundSearch(sizes, losses, limit, 40), measure)
        kept = [
            size
            for size, loss in curve.items()
            if (kl := measure(loss)) is not None and kl <= limit
        ]
        best = best_round(made, limit)
        assert best.keeps(limit) == bool(kept)
        if kept:
            assert best.bytes == min(kept)
        else:
            assert max(curve) in {one.bytes for one in made}, "given up before the largest"
        assert len(made) <= 14, [one.bytes for one in made]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rounds", [2, 3, 6])
def test_a_few_rounds_end_with_one_that_keeps_the_limit(model: str, rounds: int) -> None:
    sizes, losses = _case(5, sets=9)
    for limit in (0.004, 0.02, 0.09):
        made = _searched(RoundSearch(sizes, losses, limit, rounds), MODELS[model])
        largest = choose_options(sizes, losses, size_range(sizes)[1])
        assert largest is not None
        reached = MODELS[model](largest.loss)
        assert len(made) <= rounds
        assert best_round(made, limit).keeps(limit) == (reached is not None and reached <= limit)


def test_six_rounds_come_close() -> None:
    """Within two hundredths of the bytes of the best point, where all 2,187 choices are tried."""
    for seed, measure in itertools.product(range(3), MODELS.values()):
        sizes, losses = _case(seed)
        curve = _curve(sizes, losses)
        kept = [size for size, loss in curve.items() if (measure(loss) or 1.0) <= 0.02]
        best = best_round(_searched(RoundSearch(sizes, losses, 0.02, 6), measure), 0.02)
        assert best.bytes <= 1.02 * min(kept)


def test_a_search_goes_on_from_its_rounds() -> None:
    sizes, losses = _case(1)
    search = RoundSearch(sizes, losses, 0.02, 6)
    made = _searched(search, MODELS["a third of it"])
    read = [Round.from_json(one.as_json()) for one in made]
    assert read == made
    for count in range(len(made)):
        following = search.following(read[:count])
        assert following is not None
        assert following.options == made[count].places
    assert search.following(read) is None


def test_of_rounds_that_miss_the_limit_the_nearest_is_the_best() -> None:
    def made(size: int, kl: float | None) -> Round:
        return Round((0,), size, 0.1, kl, size)

    rounds = [made(9, 0.5), made(5, 0.4), made(7, None)]
    assert best_round(rounds, 0.1) is rounds[1]
    assert best_round(rounds, 0.5) is rounds[1]
    assert best_round([*rounds, made(4, None)], 0.45) is rounds[1]
    assert not rounds[2].keeps(100.0)
