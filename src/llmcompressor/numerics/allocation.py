# SPDX-License-Identifier: Apache-2.0
r"""Choice of one option for each of many parts, at the least loss within a number of bytes.

The multiple-choice knapsack problem (Sinha & Zoltners, *Operations Research* 27, 1979): of each
part i take one option k,

.. math:: \min \sum_i l_{i k_i} \quad\text{so that}\quad \sum_i b_{i k_i} \le B .

It is solved exactly, by dynamic programming over the sums that can be optimal: after each part, a
state is dropped if another has no more bytes and no more loss, or if even the linear relaxation of
the remaining parts cannot bring it below a choice that is known. All sums of bytes are integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]
_ROUNDING = 1e-9
"""What sums of losses may be wrong by, of the greatest: no state is dropped for less."""


class Choice(NamedTuple):
    """A choice of an option for each part.

    Attributes:
        options: the option of each part, by its place.
        bytes: their sum.
        loss: their sum.
    """

    options: tuple[int, ...]
    bytes: int
    loss: float


def choose_options(
    sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], limit: int
) -> Choice | None:
    """Choose the options of least loss, at most ``limit`` bytes in sum.

    Args:
        sizes: bytes of each option of each part.
        losses: their losses, finite, at least 0.
        limit: B.

    Returns:
        The choice, the same for the same arguments; ``None`` if the smallest options are too large.

    >>> choose_options([[1, 2], [1, 3]], [[5.0, 2.0], [4.0, 0.0]], 4)
    Choice(options=(0, 1), bytes=4, loss=5.0)
    """
    parts = [_part(*pair) for pair in zip(sizes, losses, strict=True)]
    least = [int(part.sizes[0]) for part in parts]
    if sum(least) > limit:
        return None
    bounds = _suffix_bounds(parts)
    worst = sum(float(part.losses[0]) for part in parts)
    best = _relaxed_choice(parts, limit) + _ROUNDING * worst
    room = [0, *np.cumsum(least[::-1]).tolist()][::-1]  # that the parts from i on need at least
    taken, lost = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[_Integers, _Integers]] = []
    for place, part in enumerate(parts):
        count = len(part.sizes)
        all_taken = (taken[:, None] + part.sizes).ravel()
        all_lost = (lost[:, None] + part.losses).ravel()
        spare = limit - all_taken
        keep = spare >= room[place + 1]
        at_best = all_lost + bounds[place + 1].least_loss(spare)
        keep &= at_best <= best
        found = np.flatnonzero(keep)
        found = found[np.lexsort((all_lost[found], all_taken[found]))]
        lowest = np.minimum.accumulate(np.concatenate(([np.inf], all_lost[found])))[:-1]
        found = found[all_lost[found] < lowest]
        taken, lost = all_taken[found], all_lost[found]
        steps.append((found // count, part.places[found % count]))
    at = int(np.argmin(lost))
    total, loss, options = int(taken[at]), float(lost[at]), []
    for before, option in reversed(steps):
        options.append(int(option[at]))
        at = int(before[at])
    return Choice(tuple(reversed(options)), total, loss)


def smallest_choice(
    sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], most_loss: float
) -> Choice | None:
    """Choose the options of least bytes that lose at most ``most_loss`` in sum.

    The loss of :func:`choose_options` falls where its limit rises: the limit is found by bisection.

    Args:
        sizes: as for :func:`choose_options`.
        losses: likewise.
        most_loss: the limit of the loss.

    Returns:
        The choice, of those with as few bytes the one of least loss; ``None`` if all lose more.

    >>> smallest_choice([[1, 2], [1, 3]], [[5.0, 2.0], [4.0, 0.0]], 6.0)
    Choice(options=(1, 0), bytes=3, loss=6.0)
    """
    least, most = size_range(sizes)
    found = choose_options(sizes, losses, most)
    if found is None or found.loss > most_loss:
        return None
    below = least - 1  # within so many bytes nothing loses as little
    while found.bytes - below > 1:
        middle = (below + found.bytes) // 2
        tried = choose_options(sizes, losses, middle)
        if tried is not None and tried.loss <= most_loss:
            found = tried
        else:
            below = middle
    return found


def size_range(sizes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The sum of the smallest options, and that of the largest ones."""
    return sum(map(min, sizes)), sum(map(max, sizes))


# --------------------
# Parts without options that another one beats, and their linear relaxation.


class _Part(NamedTuple):
    """The options of a part, by rising size and falling loss."""

    sizes: _Integers
    losses: _Floats
    places: _Integers


def _part(sizes: Sequence[int], losses: Sequence[float]) -> _Part:
    order = sorted(range(len(sizes)), key=lambda one: (sizes[one], losses[one], one))
    kept: list[int] = []
    for one in order:
        if not kept or losses[one] < losses[kept[-1]]:
            kept.append(one)
    return _Part(
        np.array([sizes[one] for one in kept], np.int64),
        np.array([losses[one] for one in kept], np.float64),
        np.array(kept, np.int64),
    )


@dataclass(frozen=True)
class _Bound:
    """The least loss of some parts with fractions of options, by the bytes that they may take.

    Attributes:
        room: bytes at the corners, rising, float64.
        losses: the loss there, falling.
    """

    room: _Floats
    losses: _Floats

    def least_loss(self, spare: _Integers) -> _Floats:
        """The bound for each number of bytes, which must be enough for the smallest options."""
        found: _Floats = np.interp(spare, self.room, self.losses)
        return found


class _Step(NamedTuple):
    """A step of a part along the lower convex hull of its options."""

    slope: float
    part: int
    bytes: int
    gain: float


def _steps_of(number: int, part: _Part) -> list[_Step]:
    sizes, losses = part.sizes.tolist(), part.losses.tolist()
    hull: list[int] = []
    for one in range(len(sizes)):
        while len(hull) > 1 and _slope(sizes, losses, hull[-1], one) <= _slope(
            sizes, losses, hull[-2], hull[-1]
        ):
            hull.pop()
        hull.append(one)
    pairs = pairwise(hull)
    return [
        _Step(
            _slope(sizes, losses, a, b), number, sizes[b] - sizes[a], float(losses[a] - losses[b])
        )
        for a, b in pairs
    ]


def _slope(sizes: list[int], losses: list[float], first: int, second: int) -> float:
    """Loss per byte between two options, negative."""
    return (losses[second] - losses[first]) / (sizes[second] - sizes[first])


def _suffix_bounds(parts: Sequence[_Part]) -> list[_Bound]:
    """The bounds of the parts from each place on, and of none."""
    every = sorted(step for number, part in enumerate(parts) for step in _steps_of(number, part))
    owners = np.array([step.part for step in every], np.int64)
    widths = np.array([step.bytes for step in every], np.float64)
    gains = np.array([step.gain for step in every], np.float64)
    bounds = []
    for place in range(len(parts) + 1):
        own = owners >= place
        start = float(sum(int(part.sizes[0]) for part in parts[place:]))
        worst = float(sum(part.losses[0] for part in parts[place:]))
        room = start + np.concatenate(([0.0], np.cumsum(widths[own])))
        losses = worst - np.concatenate(([0.0], np.cumsum(gains[own])))
        bounds.append(_Bound(room, np.maximum(losses, 0.0)))
    return bounds


def _relaxed_choice(parts: Sequence[_Part], limit: int) -> float:
    """The loss of a choice that fits: steps by their slope, as long as they have room."""
    spare = limit - sum(int(part.sizes[0]) for part in parts)
    loss = sum(float(part.losses[0]) for part in parts)
    closed: set[int] = set()
    for step in sorted(one for number, part in enumerate(parts) for one in _steps_of(number, part)):
        if step.part not in closed and step.bytes <= spare:
            spare, loss = spare - step.bytes, loss - step.gain
        else:
            closed.add(step.part)
    return loss
