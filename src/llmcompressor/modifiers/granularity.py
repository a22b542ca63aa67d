# SPDX-License-Identifier: Apache-2.0
"""Granularity of calibration: how much of a model is processed at once."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Granularity"]


class Granularity(StrEnum):
    """The part of a model that a modifier has to see at once, from fine to coarse.

    >>> max(Granularity.BLOCK, Granularity.LINEAR)
    <Granularity.BLOCK: 'block'>
    """

    LINEAR = "linear"
    SUB_BLOCK = "sub_block"
    BLOCK = "block"

    # All four have to be overridden: those of str compare alphabetically.
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
