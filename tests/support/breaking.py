# SPDX-License-Identifier: Apache-2.0
"""A modifier that ends a training from within."""

from __future__ import annotations

from typing import Any, ClassVar

from llmcompressor.core import Event, EventType, State
from llmcompressor.modifiers import Modifier


class Breaker(Modifier):
    """Raises once a given step was taken; a class attribute, so that the recipe is the same."""

    run_types: ClassVar[frozenset[str]] = frozenset({"train"})
    at: ClassVar[int | None] = None

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        return True

    def on_event(self, state: State, event: Event, **kwargs: Any) -> None:
        if event.type_ is EventType.BATCH_START and event.global_step == self.at:
            raise KeyboardInterrupt
