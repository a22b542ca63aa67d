# SPDX-License-Identifier: Apache-2.0
"""Constant pruning: keep the zeros of a sparse model while it is trained."""

from __future__ import annotations

from typing import ClassVar

from llmcompressor.logger import logger
from llmcompressor.modifiers.pruning.base import MaskingModifier
from llmcompressor.wording import listed

__all__ = ["ConstantPruningModifier"]


class ConstantPruningModifier(MaskingModifier):
    """Keep weights at zero that are zero at the start, in every step until the end.

    ``update`` has no effect: the mask is chosen once.

    Example::

        ConstantPruningModifier(targets="__ALL_PRUNABLE__", start=0)
    """

    needs_time: ClassVar[bool] = True
    # Other modifiers keep zeros in a oneshot by themselves.
    idle_types: ClassVar[frozenset[str]] = frozenset({"oneshot"})

    def is_due(self, index: float) -> bool:
        """Return True once, before a mask was chosen."""
        return self._index is None

    def choose(self, index: float) -> None:
        """Mask the weights that are zero now."""
        self.weights.freeze()
        dense = [name for name, sparsity in self.weights.sparsities().items() if not sparsity]
        if len(dense) == len(self.weights.places):
            logger.warning(
                f"{type(self).__name__} has nothing to keep: no weight is zero in {listed(dense)}."
            )
