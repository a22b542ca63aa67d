# SPDX-License-Identifier: Apache-2.0
"""A user's own modifier, in one module for all tests: recipes find it by the name of its class."""

from __future__ import annotations

from typing import Any, ClassVar

from llmcompressor import active_session
from llmcompressor.core import State
from llmcompressor.modifiers import Modifier


class LoggingModifier(Modifier):
    """Writes down what it is shown."""

    seen: ClassVar[list[tuple[Any, ...]]] = []

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        self.seen.append((state.model, state.hardware.device, state.optimizer, active_session()))
        return True
