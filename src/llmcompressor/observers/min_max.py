# SPDX-License-Identifier: Apache-2.0
"""Min-max observers: ranges from the extremes of tensors."""

from __future__ import annotations

from pydantic import Field

from llmcompressor.observers.base import ObserverOptions, RangeObserver, range_union
from llmcompressor.observers.canonical import Range

__all__ = [
    "AverageOptions",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "StaticMinMaxObserver",
    "average",
]


class AverageOptions(ObserverOptions):
    """Options of moving averages.

    Attributes:
        averaging_constant: weight of each new range.
    """

    averaging_constant: float = Field(default=0.01, gt=0, le=1)


class MemorylessMinMaxObserver(RangeObserver):
    """The extremes of the last tensor; suited to weights, which are observed once."""

    def combine(self, old: Range, new: Range) -> Range:
        """The new range."""
        del old
        return new


class StaticMinMaxObserver(RangeObserver):
    """The extremes of all tensors."""

    def combine(self, old: Range, new: Range) -> Range:
        """The smallest range that contains both."""
        return range_union(old, new)


class MinMaxObserver(RangeObserver):
    """An exponential moving average of extremes: r += averaging_constant * (new - r)."""

    Options = AverageOptions

    def combine(self, old: Range, new: Range) -> Range:
        """A step from the old range towards the new one."""
        return average(old, new, self.options.averaging_constant)

    def combine_peers(self, own: Range, other: Range, share: float) -> Range:
        """The mean, weighted by the number of observations."""
        return average(own, other, share)


def average(a: Range, b: Range, weight: float) -> Range:
    """(1 - weight) a + weight b."""
    return Range(a.minimum.lerp(b.minimum, weight), a.maximum.lerp(b.maximum, weight))
