# SPDX-License-Identifier: Apache-2.0
"""Events of a run, and the progress that they carry."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, SupportsFloat

from llmcompressor.errors import InputError

__all__ = ["Event", "EventType", "has_reached"]

# A quotient of two floats is off by a few units in the last place; schedules are far coarser.
_ROUNDING = 1e-10


class EventType(Enum):
    """The kinds of events that a run sends to its modifiers."""

    INITIALIZE = "initialize"
    FINALIZE = "finalize"
    BATCH_START = "batch_start"
    LOSS_CALCULATED = "loss_calculated"
    BATCH_END = "batch_end"
    CALIBRATION_EPOCH_START = "calibration_epoch_start"
    SEQUENTIAL_EPOCH_END = "sequential_epoch_end"
    CALIBRATION_EPOCH_END = "calibration_epoch_end"
    OPTIM_PRE_STEP = "optim_pre_step"
    OPTIM_POST_STEP = "optim_post_step"

    CALIBRATION_START = "calibration_epoch_start"
    CALIBRATION_END = "calibration_epoch_end"


@dataclass
class Event:
    """An event of a run: its kind, and the progress of the run.

    Attributes:
        type_: the kind of event.
        steps_per_epoch: optimizer steps in an epoch; ``None`` when the run has no epochs.
        batches_per_step: batches that make up one optimizer step.
        invocations_per_step: calls of whatever steps the optimizer, such as a gradient scaler,
            for one step of it; accumulated batches are counted by ``batches_per_step``.
        global_step: optimizer steps taken since the run began.
        global_batch: batches seen since the run began.

    Raises:
        InputError: an epoch has no step, or something was counted below zero.
    """

    type_: EventType | None = None
    steps_per_epoch: int | None = None
    batches_per_step: int | None = None
    invocations_per_step: int = 1
    global_step: int = 0
    global_batch: int = 0

    def __post_init__(self) -> None:
        if self.steps_per_epoch is not None:
            what = "an epoch has at least one step"
            remedy = "Give the optimizer steps of an epoch, or leave it out to count in steps."
            _check_count("steps_per_epoch", self.steps_per_epoch, 1, what, remedy)
        if self.batches_per_step is not None:
            remedy = "Give how many batches make up one optimizer step, or leave it out."
            what = "is a number of batches"
            _check_count("batches_per_step", self.batches_per_step, 0, what, remedy)
        remedy = "Give how many calls make up one optimizer step, or leave it out."
        what = "a step is taken with at least one call"
        _check_count("invocations_per_step", self.invocations_per_step, 1, what, remedy)
        remedy = "Give how many there were since the run began."
        for name in ("global_step", "global_batch"):
            _check_count(name, getattr(self, name), 0, "is counted from 0 on", remedy)
            if getattr(self, name) % 1:
                raise InputError(
                    f"{name} is {getattr(self, name)!r}, and is a whole number.", remedy
                )

    @property
    def epoch_based(self) -> bool:
        """Return True if the run counts in epochs."""
        return self.steps_per_epoch is not None

    @property
    def epoch(self) -> int:
        """Number of completed epochs.

        Raises:
            ValueError: the event is not epoch based; so with every ``epoch…`` property.
        """
        return self.global_step // self._steps_per_epoch("epoch")

    @property
    def epoch_full(self) -> float:
        """Number of epochs done, with the fraction of the current one.

        >>> Event(steps_per_epoch=4, global_step=6).epoch_full
        1.5
        """
        return self.global_step / self._steps_per_epoch("epoch_full")

    @property
    def epoch_step(self) -> int:
        """Number of steps done in the current epoch."""
        return self.global_step % self._steps_per_epoch("epoch_step")

    @property
    def epoch_batch(self) -> int:
        """Number of batches seen in the current epoch."""
        steps = self._steps_per_epoch("epoch_batch")
        return self.global_batch % (steps * (self.batches_per_step or 1))

    @property
    def current_index(self) -> float:
        """The index that a modifier's ``start``, ``end`` and ``update`` are compared with.

        Epochs where the run counts in epochs, else steps. Setting it moves ``global_step`` and
        ``global_batch`` there, rounding down to a whole step.
        """
        return self.epoch_full if self.epoch_based else self.global_step

    @current_index.setter
    def current_index(self, value: float) -> None:
        if not isinstance(value, SupportsFloat) or not 0 <= float(value) < math.inf:
            raise InputError(
                f"current_index is {value!r}, and is counted from 0 on.",
                "Give epochs where the run has them, else steps.",
            )
        steps = value if self.steps_per_epoch is None else value * self.steps_per_epoch
        self.global_step = int(steps)
        self.global_batch = self.global_step
        if self.batches_per_step is not None and self.batches_per_step >= 2:
            self.global_batch *= self.batches_per_step

    def should_update(self, start: float | None, end: float | None, update: float | None) -> bool:
        """Return True if a schedule that repeats every ``update`` in ``[start, end]`` is due.

        Args:
            start: first index of the schedule; ``None`` for no bound.
            end: last index of the schedule; ``None`` for no bound.
            update: distance between updates; ``None``, zero or less for always.

        Returns:
            True when the index is a multiple of ``update``, to within rounding on either side.

        >>> Event(steps_per_epoch=10, global_step=3).should_update(None, None, 0.1)
        True
        """
        index = self.current_index
        if start is not None and not has_reached(index, start):
            return False
        if end is not None and not has_reached(end, index):
            return False
        if update is None or update <= 0:
            return True
        return abs(math.remainder(index, update)) <= _ROUNDING * max(1.0, abs(index))

    def new_instance(self, **kwargs: Any) -> Event:
        """An independent copy with the named fields replaced."""
        return replace(self, **kwargs)

    def _steps_per_epoch(self, asked: str) -> int:
        if self.steps_per_epoch is None:
            raise ValueError(
                f"{asked} is not known: this event has no steps_per_epoch. "
                "Give steps_per_epoch to session.initialize, or count in steps (global_step)."
            )
        return self.steps_per_epoch


def has_reached(index: float, bound: float) -> bool:
    """Return True if a schedule at ``index`` has reached ``bound``, to within rounding.

    >>> 0.3 >= 0.1 * 3, has_reached(0.3, 0.1 * 3), has_reached(0.2, 0.3)
    (False, True, False)
    """
    return index >= bound - _ROUNDING * max(1.0, abs(bound))


def _check_count(name: str, value: Any, least: int, what: str, remedy: str) -> None:
    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
    # NaN is not at least anything
    if not is_number or not least <= value < math.inf:
        raise InputError(f"{name} is {value!r}, and {what}.", remedy)
