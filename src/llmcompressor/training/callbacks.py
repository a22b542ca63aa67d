# SPDX-License-Identifier: Apache-2.0
"""Callbacks of transformers' trainer: events without a method to override, and progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from llmcompressor.core import EventType
from llmcompressor.logger import logger
from llmcompressor.progress import Advance, progress
from llmcompressor.training.driver import SessionDriver

__all__ = ["ProgressLines", "SessionEvents"]


class SessionEvents(TrainerCallback):
    """Sends the events around the optimizer's step to the session.

    Args:
        driver: return the driver of the current training, or ``None``.
        ready: called when model and optimizer have their final form.
    """

    def __init__(
        self, driver: Callable[[], SessionDriver | None], ready: Callable[[], None]
    ) -> None:
        self._driver = driver
        self._ready = ready

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Model and optimizer are wrapped and loaded, and no batch has come yet."""
        self._ready()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The data starts from the beginning, or from the place of a checkpoint."""
        if driver := self._driver():
            driver.place.begin_pass()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The gradients of the step are complete and clipped."""
        if driver := self._driver():
            driver.before_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The optimizer has stepped, the scheduler has not."""
        if driver := self._driver():
            driver.step_done()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last micro-batch of a step is done."""
        self._send(EventType.BATCH_END)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A micro-batch that is not the last one of its step is done."""
        self._send(EventType.BATCH_END)

    def _send(self, event_type: EventType) -> None:
        if driver := self._driver():
            driver.send(event_type)


class ProgressLines(TrainerCallback):
    """Progress without a terminal: an occasional log line with the time left."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._advance: Advance | None = None
        self._step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start counting."""
        if state.is_world_process_zero:
            left = state.max_steps - state.global_step
            self._advance = self._open.enter_context(progress(left, "Training", terminal=False))
        self._step = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count a step."""
        if self._advance is not None:
            self._advance(state.global_step - self._step)
        self._step = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the trainer's log entry as one line."""
        if state.is_world_process_zero and self._advance is not None:
            told = {name: value for name, value in (logs or {}).items() if name != "total_flos"}
            parts = (
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in told.items()
            )
            logger.info("Step {}: {}", state.global_step, ", ".join(parts))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop counting."""
        self._open.close()
        self._advance = None
