# SPDX-License-Identifier: Apache-2.0
"""Where in its data a training is.

transformers finds the place by dividing the steps by those of an epoch. A stream has no number of
steps in an epoch: once it has begun anew, the place has to be known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DataPlace"]

_KEY = "data_place"


class DataPlace:
    """Counts the passes over the data, and the micro-batches of the present one.

    Args:
        passes: that were completed.
        batches: micro-batches of the present pass, of this process.

    Attributes:
        resumed: the passes and batches that a checkpoint was written after, if one says so.
    """

    def __init__(self, passes: int = 0, batches: int = 0) -> None:
        self._passes, self._batches = passes, batches
        self._begun = False
        self.resumed: tuple[int, int] | None = None

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> DataPlace:
        """Go on from what :meth:`record` returned."""
        found = saved.get(_KEY)
        place = cls() if found is None else cls(*found)
        place.resumed = None if found is None else (place._passes, place._batches)
        return place

    def record(self) -> dict[str, list[int]]:
        """What a checkpoint keeps."""
        return {_KEY: [self._passes, self._batches]}

    def begin_pass(self) -> None:
        """A pass begins; the first one where the place is."""
        if self._begun:
            self._passes, self._batches = self._passes + 1, 0
        self._begun = True

    def take_batch(self) -> None:
        """A micro-batch was taken."""
        self._batches += 1
