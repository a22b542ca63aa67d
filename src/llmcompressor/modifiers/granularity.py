# SPDX-License-Identifier: Apache-2.0
"""How much of a model is calibrated at once."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Granularity"]


class Granularity(StrEnum):
    """How much of a model a modifier has to see at once, from fine to coarse.

    >>> max(Granularity.BLOCK, Granularity.LINEAR)
    <Granularity.BLOCK: 'block'>
    """

    LINEAR = "linear"
    SUB_BLOCK = "sub_block"
    BLOCK = "block"

    # All four: a str brings its own, which would go by the alphabet.
    def __lt__(self, other: str) -> bool:
        return self._rank < Granularity(other)._rank

    def __le__(self, other: str) -> bool:
        return self._rank <= Granularity(other)._rank

    def __gt__(self, other: str) -> bool:
        return self._rank > Granularity(other)._rank

    def __ge__(self, other: str) -> bool:
        return self._rank >= Granularity(other)._rank

    @property
    def _rank(self) -> int:
        return list(Granularity).index(self)
