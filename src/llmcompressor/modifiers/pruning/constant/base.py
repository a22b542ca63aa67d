# SPDX-License-Identifier: Apache-2.0
"""A model that is sparse already is trained and stays so."""

from __future__ import annotations

from typing import ClassVar

from llmcompressor.logger import logger
from llmcompressor.modifiers.pruning.base import MaskingModifier
from llmcompressor.wording import listed

__all__ = ["ConstantPruningModifier"]


class ConstantPruningModifier(MaskingModifier):
    """Keeps the weights at zero that are zero when it starts, through every step until it ends.

    ``update`` has no effect: the mask is taken once.

    Example::

        ConstantPruningModifier(targets="__ALL_PRUNABLE__", start=0)
    """

    needs_time: ClassVar[bool] = True
    # What others do in a oneshot keeps zeros by itself.
    idle_types: ClassVar[frozenset[str]] = frozenset({"oneshot"})

    def is_due(self, index: float) -> bool:
        """Once."""
        return self._index is None

    def choose(self, index: float) -> None:
        """Take the zeros that are there."""
        self.weights.freeze()
        dense = [name for name, sparsity in self.weights.sparsities().items() if not sparsity]
        if len(dense) == len(self.weights.places):
            logger.warning(
                f"{type(self).__name__} has nothing to keep: no weight is zero in {listed(dense)}."
            )
