# SPDX-License-Identifier: Apache-2.0
"""No-op gatherer of importance matrices, which the observer collects itself.

See :mod:`llmcompressor.observers.imatrix`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from llmcompressor.core.contract import Granularity, Traits
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.logger import logger

__all__ = ["IMatrixGatherer"]


class IMatrixGatherer(Modifier):
    """Do nothing: a quantizing modifier with the observer ``imatrix_mse`` needs no other.

    Attributes:
        targets: accepted, without effect.
        ignore: accepted, without effect.
        weight_observer: accepted, without effect.
    """

    targets: str | list[str] = "Linear"
    ignore: str | list[str] = Field(default_factory=list)
    weight_observer: str = "imatrix_mse"

    @property
    def traits(self) -> Traits:
        """Single Linears, so it does not coarsen that of other modifiers; it finishes nothing."""
        return Traits(granularity=Granularity.LINEAR, by_block=True)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Warn that it has no effect."""
        logger.warning(
            "IMatrixGatherer does nothing: the modifier behind it gathers the importance itself if "
            "its weight_observer is imatrix_mse."
        )
        return True
