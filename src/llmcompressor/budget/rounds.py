# SPDX-License-Identifier: Apache-2.0
"""The search for the smallest choice that is measured to keep a limit of the KL divergence.

The expected losses say which choice is the best one of each size. That gives a curve, and the
divergence falls along it. Each round makes the model of one point and measures it; then the next
point is sought between the largest that missed the limit and the smallest that kept it:

1. the first one is where the estimate puts the limit;
2. as long as all rounds kept the limit, or all missed it, the estimate is scaled by what the
   nearest one has measured;
3. between two rounds the logarithm of the divergence is taken for linear in that of the estimate;
   where two rounds in a row ended on the same side, the bytes between the two are halved. Where
   it says that nothing lies between, the next smaller choice than the one that kept the limit is
   made, which ends the search if it does not.

The search ends where no point of the curve lies between the two, or after a number of rounds. The
last round is of the largest choice, if none before has kept the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from llmcompressor.numerics.allocation import (
    Choice,
    choose_options,
    size_range,
    smallest_choice,
)

_SHORT_OF = 0.97
"""Of the limit: what is aimed at while every round has missed it."""
_FIRST = 2
"""Rounds before there can be two of which the second was to cross the limit."""
_LEAST = 1e-12
"""Nats a token, below which divergences are not told apart."""


@dataclass(frozen=True)
class Round:
    """A choice whose model was made and measured.

    Attributes:
        places: the place of the candidate of each set.
        bytes: of the modules that were quantized.
        loss: what was expected, in nats a token.
        kl: what was measured; ``None`` if it is no number.
        size: bytes of the weight files.
    """

    places: tuple[int, ...]
    bytes: int
    loss: float
    kl: float | None
    size: int

    def keeps(self, limit: float) -> bool:
        """Return True if the measured divergence is at most ``limit``."""
        return self.kl is not None and self.kl <= limit

    @property
    def divergence(self) -> float:
        """The measured divergence, infinite if it is no number."""
        return math.inf if self.kl is None else max(self.kl, _LEAST)

    def as_json(self) -> dict[str, Any]:
        """What a journal keeps."""
        return {**asdict(self), "places": list(self.places)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Round:
        """What :meth:`as_json` has made."""
        return cls(**{**found, "places": tuple(found["places"])})


def best_round(made: Sequence[Round], limit: float) -> Round:
    """The smallest round that keeps the limit; if none does, the one of least divergence."""
    kept = [one for one in made if one.keeps(limit)]
    if kept:
        return min(kept, key=lambda one: (one.bytes, one.divergence))
    return min(made, key=lambda one: (one.divergence, one.bytes))


@dataclass(frozen=True)
class RoundSearch:
    """A search, which is decided by the rounds that were made.

    Attributes:
        sizes: bytes of each set with each candidate.
        losses: what is expected of them, in nats a token.
        limit: of the divergence that is measured, in nats a token.
        rounds: how many there are at most.
    """

    sizes: Sequence[Sequence[int]]
    losses: Sequence[Sequence[float]]
    limit: float
    rounds: int

    def following(self, made: Sequence[Round]) -> Choice | None:
        """The choice of the next round; ``None`` if the search is over.

        Args:
            made: the rounds so far.
        """
        if len(made) >= self.rounds:
            return None
        kept = min((one for one in made if one.keeps(self.limit)), key=_bytes, default=None)
        missed = [
            one
            for one in made
            if not one.keeps(self.limit) and (kept is None or one.bytes < kept.bytes)
        ]
        below = max(missed, key=_bytes, default=None)
        if kept is None:
            return self._larger(below, is_last=len(made) + 1 == self.rounds)
        lowest = size_range(self.sizes)[0] - 1 if below is None else below.bytes
        tried = (aim() for aim in self._aims(below, kept, made))
        inside = (one for one in tried if one is not None and lowest < one.bytes < kept.bytes)
        return next(inside, None)

    def _aims(
        self, below: Round | None, kept: Round, made: Sequence[Round]
    ) -> Iterator[Callable[[], Choice | None]]:
        """Yield what is to be tried between two rounds, the best first; the last are their ends."""
        last = [one.keeps(self.limit) for one in made[-2:]]
        if below is None:
            loss = kept.loss * self.limit / kept.divergence
            yield partial(self._expected, loss)
        elif (len(made) > _FIRST and last[0] == last[1]) or math.isinf(below.divergence):
            yield partial(self._within, (below.bytes + kept.bytes) // 2)
        else:
            yield partial(self._expected, self._interpolated(below, kept))
        yield partial(self._within, kept.bytes - 1)

    def _larger(self, below: Round | None, *, is_last: bool) -> Choice | None:
        """The next choice while none has kept the limit."""
        largest = self._expected(-1.0)
        if below is None:
            return self._expected(self.limit)
        if below.bytes >= largest.bytes:
            return None
        if is_last:
            return largest
        return self._expected(below.loss * _SHORT_OF * self.limit / below.divergence)

    def _interpolated(self, below: Round, kept: Round) -> float:
        """The expected loss at which the limit is likely to lie."""
        if kept.loss <= 0:
            return 0.0
        span = math.log(below.divergence / kept.divergence)
        share = math.log(self.limit / kept.divergence) / span
        return float(kept.loss * (below.loss / kept.loss) ** share)

    def _expected(self, loss: float) -> Choice:
        """The smallest choice that is expected to lose so much; the largest if none is."""
        found = smallest_choice(self.sizes, self.losses, loss)
        found = found or self._within(size_range(self.sizes)[1])
        assert found is not None  # the largest options fit
        return found

    def _within(self, limit: int) -> Choice | None:
        return choose_options(self.sizes, self.losses, limit)


def _bytes(one: Round) -> int:
    return one.bytes
