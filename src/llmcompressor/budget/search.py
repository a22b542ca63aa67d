# SPDX-License-Identifier: Apache-2.0
"""The choice of a scheme for each set of modules, within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmcompressor.budget.options import BudgetOptions, OptionFinder
from llmcompressor.budget.rounds import Round
from llmcompressor.errors import RecipeError
from llmcompressor.logger import logger
from llmcompressor.numerics.allocation import (
    Choice,
    choose_options,
    size_range,
    smallest_choice,
)
from llmcompressor.schemes.budget import KL

_TRIES = 8
_POINTS = 9
_BITS = 8


@dataclass(frozen=True)
class CurvePoint:
    """The best choice for one size.

    Attributes:
        bits: bits for each weight of the modules that are quantized, with their scales.
        size: bytes of the weight files.
        loss: the expected rise of the loss of a token, in nats; ``None`` if not measured.
        counts: candidate → number of sets that get it.
        places: the place of the candidate of each set.
    """

    bits: float
    size: int
    loss: float | None
    counts: Mapping[str, int]
    places: tuple[int, ...]


@dataclass(frozen=True)
class SettledBudget:
    """A budget for which the schemes have been found.

    Attributes:
        key: of all that the choice depends on.
        places: the place of the candidate of each set.
        figures: what the report says of it; ``None`` if the output is whole already.
    """

    key: str
    places: tuple[int, ...]
    figures: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """What a journal keeps."""
        return {"key": self.key, "places": list(self.places)}


@dataclass(frozen=True)
class Allowance:
    """A budget in bytes of the modules that are quantized.

    Attributes:
        options: what there is to choose from.
        smallest: the places of the candidates that make the smallest files.
        beside: the least bytes of the weight files besides these modules, headers included.
        dense: bytes of the weights of these modules as they are.
        files: bytes of the weight files with the smallest candidates, with the largest ones, and
            of the model as it is.
    """

    options: BudgetOptions
    smallest: tuple[int, ...]
    beside: int
    dense: int
    files: tuple[int, int, int]

    def bits(self, size: int) -> float:
        """Bits for each weight, of bytes."""
        return size * _BITS / self.options.weights

    def limit(self) -> int:
        """The bytes that the modules may take, at most those of the largest candidates.

        Raises:
            RecipeError: the budget is below what the candidates allow, or above the unquantized
                model.
        """
        return self._limit

    @cached_property
    def _limit(self) -> int:
        """The limit, found and warned of once.

        A limit of the divergence says nothing of bytes. By a limit of the files' bytes no choice
        is left out that keeps it; of those within it, some may have too long a header.
        """
        options, budget = self.options, self.options.budget
        least, most = size_range(options.sizes)
        if budget.kind == KL:
            return most
        is_size = budget.kind == "size"
        limit = int(budget.limit if is_size else budget.limit * options.weights / _BITS)
        low, high, dense = self.files if is_size else (least, most, self.dense)
        names = ", ".join(one.name for one in options.candidates)
        reach = f"{self._shown(low)} to {self._shown(high)}"
        if limit < low:
            raise RecipeError(
                f"The budget of {self._given()} is below what its candidates ({names}) allow, "
                f"which is {reach}.",
                "Give a larger budget, or candidates of fewer bits.",
            )
        if limit >= dense:
            raise RecipeError(
                f"The budget of {self._given()} is no less than the model takes unquantized, "
                f"{self._shown(dense)}.",
                f"Give a budget within what the candidates ({names}) allow, {reach}.",
            )
        if limit > high:
            logger.warning(
                f"The budget of {self._given()} is above what its candidates ({names}) can use, "
                f"which is {reach}: all modules get the largest."
            )
        return min(limit - self.beside if is_size else limit, most)

    def _given(self) -> str:
        """The limit in full: rounded it may look like what it is compared with."""
        budget = self.options.budget
        return (
            f"{budget.limit:.12g} bits" if budget.kind == "bits" else f"{int(budget.limit):,} bytes"
        )

    def _shown(self, size: int) -> str:
        if self.options.budget.kind == "bits":
            return f"{self.bits(size):.4f} bits"
        return f"{size:,} bytes"


def allowance_of(finder: OptionFinder, options: BudgetOptions) -> Allowance:
    """What a budget allows: headers of files differ by what the schemes store."""
    places = range(len(options.candidates))
    known: dict[tuple[int, ...], int] = {}

    def size_of(choice: tuple[int, ...]) -> int:
        if choice not in known:
            known[choice] = finder.file_bytes(options.scheme_by_module(choice))
        return known[choice]

    def beside(choice: tuple[int, ...]) -> int:
        own = zip(options.sizes, choice, strict=True)
        return size_of(choice) - sum(sizes[place] for sizes, place in own)

    count = len(options.sets)
    uniform = [beside((place,) * count) for place in places]
    # of options with as many bytes the header decides
    pairs = [[(sizes[place], uniform[place], place) for place in places] for sizes in options.sizes]
    smallest, largest = (tuple(pick(one)[-1] for one in pairs) for pick in (min, max))
    return Allowance(
        options,
        smallest,
        min(*uniform, beside(smallest), beside(largest)),
        finder.dense_bytes(options),
        (size_of(smallest), size_of(largest), finder.unquantized_bytes()),
    )


def choose(
    finder: OptionFinder, allowance: Allowance, losses: Sequence[Sequence[float]] | None
) -> CurvePoint:
    """Choose the candidates of least loss that keep the budget, to the byte.

    For a limit of the divergence these are the smallest that are expected to keep it, and the
    largest where nothing is expected of any.

    Args:
        finder: predicts the bytes of a choice.
        allowance: the budget.
        losses: of each set and candidate; ``None``: all that fits is used.

    Raises:
        RecipeError: the budget cannot be kept.
    """
    options, limit = allowance.options, allowance.limit()
    if options.budget.kind == KL and losses is not None:
        estimate = smallest_choice(options.sizes, losses, options.budget.limit)
        found = estimate or choose_options(options.sizes, losses, limit)
        assert found is not None  # the largest options fit
        return point_of(finder, allowance, found, is_measured=True)
    expected = losses or largest_first(options)
    for _ in range(_TRIES):
        found = choose_options(options.sizes, expected, limit)
        if found is None:
            break
        point = point_of(finder, allowance, found, is_measured=losses is not None)
        over = point.size - int(options.budget.limit) if options.budget.kind == "size" else 0
        if over <= 0:
            return point
        limit = min(limit, found.bytes) - over  # headers have a few bytes more or less
    pairs = list(zip(options.sizes, expected, allowance.smallest, strict=True))
    size = sum(sizes[place] for sizes, _, place in pairs)
    smallest = Choice(allowance.smallest, size, sum(lost[place] for _, lost, place in pairs))
    return point_of(finder, allowance, smallest, is_measured=losses is not None)


def largest_first(options: BudgetOptions) -> list[list[float]]:
    """Losses that stand for those that are not measured: a budget is used up with them."""
    return [[float(max(sizes) - one) for one in sizes] for sizes in options.sizes]


def curve_of(
    finder: OptionFinder, allowance: Allowance, losses: Sequence[Sequence[float]] | None
) -> list[CurvePoint]:
    """The best choices from the smallest size to the largest one.

    Args:
        finder: predicts the bytes of a choice.
        allowance: the options.
        losses: of each set and candidate; ``None``: the two ends alone.
    """
    options = allowance.options
    least, most = size_range(options.sizes)
    steps = 1 if losses is None else _POINTS - 1
    points: dict[int, CurvePoint] = {}
    for step in range(steps + 1):
        limit = least + (most - least) * step // steps
        found = choose_options(options.sizes, losses or largest_first(options), limit)
        if found is not None and found.bytes not in points:
            points[found.bytes] = point_of(finder, allowance, found, is_measured=losses is not None)
    return list(points.values())


def point_of(
    finder: OptionFinder, allowance: Allowance, choice: Choice, *, is_measured: bool
) -> CurvePoint:
    """A choice as a point of the curve."""
    options = allowance.options
    return CurvePoint(
        allowance.bits(choice.bytes),
        finder.file_bytes(options.scheme_by_module(choice.options)),
        choice.loss if is_measured else None,
        _counts(options, choice.options),
        choice.options,
    )


def point_of_round(allowance: Allowance, made: Round) -> CurvePoint:
    """A round as a point of the curve."""
    counts = _counts(allowance.options, made.places)
    return CurvePoint(allowance.bits(made.bytes), made.size, made.loss, counts, made.places)


def _counts(options: BudgetOptions, places: Sequence[int]) -> dict[str, int]:
    """The number of sets that get each candidate."""
    counts = Counter(options.candidates[place].name for place in places)
    return {one.name: counts[one.name] for one in options.candidates}


def figures_of(
    options: BudgetOptions,
    curve: Sequence[CurvePoint],
    chosen: CurvePoint,
    made: Sequence[Round] = (),
) -> dict[str, Any]:
    """What the report of a run says of its budget, as JSON data.

    Args:
        options: what there was to choose from.
        curve: the best choices by size.
        chosen: what was chosen.
        made: the rounds of a limit of the divergence.
    """
    budget = options.budget
    return {
        "kind": budget.kind,
        "limit": budget.limit,
        "chosen": {**_figures(chosen), "sets": dict(chosen.counts)},
        "curve": [_figures(one) for one in curve],
        "rounds": [
            {
                "bytes": one.size,
                "loss": one.loss,
                "kl": one.kl,
                "kept": one.keeps(budget.limit),
            }
            for one in made
        ],
    }


def _figures(point: CurvePoint) -> dict[str, Any]:
    return {"bits": point.bits, "bytes": point.size, "loss": point.loss}


def tell_choice(options: BudgetOptions, point: CurvePoint) -> None:
    """Log a choice."""
    shares = ", ".join(f"{count} in {name}" for name, count in point.counts.items())
    loss = "" if point.loss is None else f", expected loss {point.loss:.4g}"
    budget = options.budget
    limit = (
        f"{budget.limit:g} {budget.kind}" if budget.kind != "size" else f"{budget.limit:,} bytes"
    )
    logger.info(
        f"Budget of {limit}: {len(options.sets)} sets of "
        f"modules, {shares}; {point.bits:.4f} bits a weight, {point.size:,} bytes of weights{loss}."
    )
