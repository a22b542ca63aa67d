# SPDX-License-Identifier: Apache-2.0
"""Position of a training in its data.

transformers computes the position by dividing the steps by those of an epoch. A stream has no known
number of steps in an epoch: once it has started again, its position has to be counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DataPlace"]

_KEY = "data_place"


class DataPlace:
    """Counts the passes over the data and the micro-batches of the current pass.

    Args:
        passes: completed passes.
        batches: micro-batches of the current pass in this process.

    Attributes:
        resumed: the passes and batches at the time of the resumed checkpoint, if it has them.
    """

    def __init__(self, passes: int = 0, batches: int = 0) -> None:
        self._passes, self._batches = passes, batches
        self._begun = False
        self.resumed: tuple[int, int] | None = None

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> DataPlace:
        """Restore the position from the result of :meth:`record`."""
        found = saved.get(_KEY)
        place = cls() if found is None else cls(*found)
        place.resumed = None if found is None else (place._passes, place._batches)
        return place

    def record(self) -> dict[str, list[int]]:
        """Return the position for a checkpoint."""
        return {_KEY: [self._passes, self._batches]}

    def begin_pass(self) -> None:
        """Start the next pass; the first one starts at the restored position."""
        if self._begun:
            self._passes, self._batches = self._passes + 1, 0
        self._begun = True

    def take_batch(self) -> None:
        """Count a micro-batch."""
        self._batches += 1
