# SPDX-License-Identifier: Apache-2.0
"""Radix selection of the smallest scores within an exact budget, in bounded memory.

The bits of a non-negative float, read as an integer, have the order of the floats. So the
threshold is found digit by digit (radix selection, 16 bits a digit): count how often each first
digit occurs, find the one in which the budget ends, count the second digits of the scores that
begin with it, and so on. Every score is read once per digit, in chunks and one pool after another;
nothing is sorted, joined or kept except 65 536 counts. Counts are integers, so the result depends
neither on the device nor on the chunks.

Ties: scores are taken in the order of the pools, and within one by position in memory.

Shapes: U units of one pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cut", "Pool", "find_cut", "take"]

_CHUNK_ELEMENTS = 1 << 22
_CPU_CHUNK_ELEMENTS = 1 << 19
"""On a CPU, where what is made of a chunk should fit into the cache."""
_DIGIT = 16
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}
_LARGEST_KEY = 1 << 63


@dataclass(frozen=True)
class Pool:
    """Units of one tensor from which the smallest are selected.

    Attributes:
        score_U: floating dtype, any shape; the absolute value counts. No NaN.
        free_U: bool, same shape; false for units that may not be selected.
        size: cost of one unit in the budget.
    """

    score_U: Tensor
    free_U: Tensor
    size: int = 1


@dataclass(frozen=True)
class Cut:
    """The threshold at which a budget is exhausted.

    Attributes:
        key: units with a smaller key are selected.
        spare: remaining budget for units with exactly this key.
        dtype: float32 or float64, whose bits the keys are.
    """

    key: int
    spare: int
    dtype: torch.dtype


def find_cut(pools: Callable[[], Iterable[Pool]], budget: int, dtype: torch.dtype) -> Cut:
    """Find the score at which ``budget`` is exhausted, from the smallest score on.

    A unit that does not fit ends the selection: the next one is not tried in its place.

    Args:
        pools: called once per digit, so that pools can be computed one at a time.
        budget: sum of the sizes that may be selected.
        dtype: float32 or float64; scores are compared in it.

    Returns:
        The cut; :func:`take` of every pool, in the same order, selects the units.
    """
    if budget <= 0:
        return Cut(0, 0, dtype)
    key, spare = 0, budget
    bits = torch.finfo(dtype).bits
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        counts = torch.zeros(1 << _DIGIT, dtype=torch.int64)
        for pool in pools():
            counts += _digit_counts(pool, key, shift, dtype).cpu() * pool.size
        sums = counts.cumsum(0)
        digit = int(torch.searchsorted(sums, spare, right=True))
        if digit == len(sums):
            return Cut(_LARGEST_KEY, 0, dtype)  # all fit; so it is only for the first digit
        spare -= int(sums[digit - 1]) if digit else 0
        key = (key << _DIGIT) | digit
    return Cut(key, spare, dtype)


def take(pool: Pool, cut: Cut) -> tuple[Tensor, Cut]:
    """Select the units of ``pool`` below the cut.

    Returns:
        Bool of the pool's shape, and the cut for the next pool, with the remaining budget.
    """
    taken_U = torch.zeros_like(pool.free_U, memory_format=torch.contiguous_format)
    flat_U, spare = taken_U.view(-1), cut.spare
    for at, key_U, free_U in _chunks(pool, cut.dtype):
        if cut.key == _LARGEST_KEY:
            flat_U[at] = free_U
            continue
        chosen_U = (key_U < cut.key) & free_U
        if spare >= pool.size:
            level_U = (key_U == cut.key) & free_U
            found = int(level_U.sum())
            fit = min(found, spare // pool.size)
            if fit < found:
                level_U[level_U.nonzero()[fit:]] = False
            chosen_U |= level_U
            spare -= fit * pool.size
        flat_U[at] = chosen_U
    return taken_U, Cut(cut.key, spare, cut.dtype)


def _digit_counts(pool: Pool, prefix: int, shift: int, dtype: torch.dtype) -> Tensor:
    """Count of each digit that follows ``prefix`` in the keys of the free units, int64 [2^16]."""
    counts = torch.zeros(1 << _DIGIT, dtype=torch.int64, device=pool.score_U.device)
    first = shift == torch.finfo(dtype).bits - _DIGIT
    for _, key_U, free_U in _chunks(pool, dtype):
        head_U = key_U >> shift
        counted_U = free_U if first else free_U & ((head_U >> _DIGIT) == prefix)
        digit_U = (head_U & ((1 << _DIGIT) - 1))[counted_U]
        counts += torch.bincount(digit_U, minlength=1 << _DIGIT)
    return counts


def _chunks(pool: Pool, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Positions, keys (int32 or int64) and free masks of a bounded number of units at a time."""
    score_U, free_U = pool.score_U.reshape(-1), pool.free_U.reshape(-1)
    step = _CPU_CHUNK_ELEMENTS if score_U.device.type == "cpu" else _CHUNK_ELEMENTS
    for low in range(0, len(score_U), step):
        at = slice(low, low + step)
        # abs() clears the sign, so that zero has one key; the copy also makes it contiguous.
        yield at, score_U[at].to(dtype).abs().view(_KEYS[dtype]), free_U[at]
