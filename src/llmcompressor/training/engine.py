# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine, which steps by itself at the end of the backward pass of a step.

The trainer tells of the step when it is over. Who has to hear of it before listens here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ToldSteps"]


class ToldSteps:
    """An engine that tells before it steps.

    Args:
        engine: DeepSpeed's; its ``step`` is replaced until :meth:`leave`.
        before: called when the gradients of all micro-batches of a step are there.
    """

    def __init__(self, engine: Any, before: Callable[[], None]) -> None:
        self._engine, step = engine, engine.step

        def told(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                before()
            return step(*args, **kwargs)

        engine.step = told

    def leave(self) -> None:
        """Have the engine step as its class says."""
        del self._engine.step
