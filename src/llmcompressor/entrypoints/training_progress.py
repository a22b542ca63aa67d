# SPDX-License-Identifier: Apache-2.0
"""Progress bar and log lines of a training."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback

from llmcompressor.logger import logger
from llmcompressor.progress import Advance, progress

__all__ = ["TrainingBar"]

_SHOWN = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch")


class TrainingBar(TrainerCallback):
    """Shows steps and remaining time as a bar or log lines, and logs the trainer's metrics.

    Args:
        stack: closes the bar, also if the training fails.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._advance: Advance | None = None
        self._done = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar at the first step, or at the step of a resumed training."""
        if not state.is_world_process_zero:
            return
        self._advance = self._stack.enter_context(progress(state.max_steps, "Training"))
        self._done = state.global_step
        self._advance(self._done)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar by the steps taken."""
        if self._advance is not None:
            self._advance(state.global_step - self._done)
            self._done = state.global_step

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Show the loss in the bar and log the metrics."""
        if self._advance is None or not logs:
            return
        if "loss" in logs:
            self._advance(0, note=f"loss {float(logs['loss']):.4g}")
        shown = [f"{name} {float(logs[name]):.4g}" for name in _SHOWN if name in logs]
        if "loss" in logs or "eval_loss" in logs:
            logger.info(f"Step {state.global_step}: {', '.join(shown)}")
