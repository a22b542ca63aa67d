# SPDX-License-Identifier: Apache-2.0
"""Quality gates: limits that a checkpoint has to keep to get its name, as arguments and in recipes.

==============  ===============================================================  ============
``kl``          mean KL divergence from the original, in nats a token            at most
``perplexity``  the perplexity over that of the original                         at most
``top1``        share of tokens where both models' first choice is the same      at least
``size``        bytes of the weight files                                        at most
==============  ===============================================================  ============
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from llmcompressor.args.checks import number, size
from llmcompressor.errors import ArgumentError, did_you_mean

FORM = "limits by name, such as {'kl': 0.02, 'size': '5GB'} (--gate kl=0.02 --gate size=5GB)"


@dataclass(frozen=True)
class Gate:
    """A kind of gate.

    Attributes:
        check: the check of its limit.
        expected: the limits that there are, in words.
        is_least: the limit is the least that is allowed, and not the most.
    """

    check: Callable[[str, Any], float]
    expected: str
    is_least: bool = False

    def passes(self, value: float | None, limit: float) -> bool:
        """Return True if a measured value keeps the limit; ``None``, not a number, does not."""
        return value is not None and (value >= limit if self.is_least else value <= limit)


SIZE = "size"
"""The gate for which nothing is measured."""
GATES: Mapping[str, Gate] = {
    "kl": Gate(number(0.0, 100.0), "nats a token, such as 0.02"),
    "perplexity": Gate(
        number(0.5, 10.0), "a ratio to the perplexity of the original, such as 1.03; 10 at most"
    ),
    "top1": Gate(number(0.0, 1.0), "a share from 0 to 1, such as 0.9", is_least=True),
    SIZE: Gate(size, "a number of bytes, or a size such as 5GB"),
}
"""Name → what it limits."""


def parse_gates(name: str, value: Any) -> dict[str, float]:
    """Check for gates: a mapping, or ``"name=limit"`` texts; stored as a new dict.

    Args:
        name: of the argument; errors name single gates.
        value: as it was given.

    Raises:
        ArgumentError: it is something else, a name is unknown, or a limit is out of range.

    >>> parse_gates("gates", ["kl=0.02", "size=5GB"])
    {'kl': 0.02, 'size': 5000000000}
    """
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple) and all(
        isinstance(one, str) and "=" in one for one in value
    ):
        parts = [one.partition("=") for one in value]
        names = [key.strip() for key, _, _ in parts]
        if twice := [key for key in dict.fromkeys(names) if names.count(key) > 1]:
            raise ArgumentError(f"The gate {twice[0]!r} is given twice.", "Give each once.")
        value = {key.strip(): _number_of(limit.strip()) for key, _, limit in parts}
    if not isinstance(value, Mapping):
        raise ArgumentError(f"The argument {name!r} cannot be {value!r:.80}.", f"Give {FORM}.")
    return {str(key): _limit(key, limit) for key, limit in value.items()}


def _limit(key: Any, limit: Any) -> float:
    known = GATES.get(key) if isinstance(key, str) else None
    if known is None:
        raise ArgumentError(f"There is no gate {key!r:.80}.", did_you_mean(str(key), GATES))
    try:
        found = known.check(key, limit)
    except ArgumentError:
        found = inf
    if not 0 < found < inf:
        raise ArgumentError(f"The gate {key!r} cannot be {limit!r:.80}.", f"Give {known.expected}.")
    return found


def _number_of(text: str) -> Any:
    try:
        return float(text)
    except ValueError:  # a size with a unit
        return text
