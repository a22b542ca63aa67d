# SPDX-License-Identifier: Apache-2.0
"""The manager of a run's metric loggers and their frequency."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, SupportsFloat, get_args

from llmcompressor.errors import ArgumentError, did_you_mean
from llmcompressor.metrics.loggers import BaseLogger, Level, PythonLogger

__all__ = ["FrequencyType", "LoggerManager", "LoggingMode", "MetricLogging", "SystemLogging"]

LoggingMode = Literal["exact", "on_change"]
FrequencyType = Literal["epoch", "step"]

# Sums of fractions of an epoch are off by a few units in the last place.
_ROUNDING = 1e-9


class LoggerManager:
    """Forwards entries to every logger, and decides when it is time to log.

    Args:
        loggers: the initial loggers.
        log_frequency: epochs or steps between two logs; 0 for always, ``None`` for never. A run
            without epochs always counts steps.
        log_python: also log to this package's log.
        name: the manager's name.
        mode: ``"exact"`` to log by the frequency alone, ``"on_change"`` to skip a log if the
            optimizer has not changed the model since the last one.
        frequency_type: the unit of the frequency, epochs or steps.

    Raises:
        ArgumentError: an unknown mode or type, a negative frequency, or no logger.
    """

    def __init__(
        self,
        loggers: Iterable[BaseLogger] | None = None,
        log_frequency: float | None = 0.1,
        log_python: bool = True,
        name: str = "manager",
        mode: LoggingMode = "exact",
        frequency_type: FrequencyType = "epoch",
    ) -> None:
        _check_choice("mode", mode, get_args(LoggingMode))
        _check_choice("frequency_type", frequency_type, get_args(FrequencyType))
        is_number = isinstance(log_frequency, SupportsFloat) and log_frequency is not True
        if log_frequency is not None and not (is_number and float(log_frequency) >= 0):
            raise ArgumentError(
                f"log_frequency is {log_frequency!r}.", "Give 0 for always or None for never."
            )
        self.name = name
        self.log_frequency = log_frequency
        self.mode = mode
        self.frequency_type = frequency_type
        self._loggers = [_checked(each) for each in _listed(loggers)]
        if log_python and not any(isinstance(each, PythonLogger) for each in self._loggers):
            self._loggers.append(PythonLogger())
        self._last: float | None = None
        self._changed = True
        self.metric = MetricLogging(self)
        self.system = SystemLogging(self)

    @classmethod
    def of(cls, given: Any) -> LoggerManager | None:
        """Return a given manager, or a manager of the given loggers; ``None`` for ``None``.

        Raises:
            ArgumentError: they are no loggers.
        """
        return given if given is None or isinstance(given, cls) else cls(given)

    @property
    def loggers(self) -> list[BaseLogger]:
        """A copy of the list of loggers, in order."""
        return list(self._loggers)

    def __len__(self) -> int:
        return len(self._loggers)

    def __bool__(self) -> bool:
        return True  # a manager without loggers is still a manager

    def __iter__(self) -> Iterator[BaseLogger]:
        return iter(self.loggers)

    def add_logger(self, logger: BaseLogger) -> None:
        """Add a logger.

        Raises:
            ArgumentError: it is no logger.
        """
        self._loggers.append(_checked(logger))

    def log_ready(self, step: int, epoch: float | None = None) -> bool:
        """Return True if it is time to log.

        Args:
            step: optimizer steps taken.
            epoch: epochs done, with the fraction of the current one.
        """
        if self.log_frequency is None or not any(each.enabled for each in self._loggers):
            return False
        if self._last is None:
            return True
        if self.mode == "on_change" and not self._changed:
            return False
        since = self._position(step, epoch) - self._last
        # A negative distance: another run has begun.
        return since < 0 or since >= self.log_frequency - _ROUNDING

    def log_written(self, step: int, epoch: float | None = None) -> None:
        """Record that something was logged here, from which :meth:`log_ready` counts."""
        self._last = self._position(step, epoch)
        self._changed = False

    def model_updated(self) -> None:
        """Record that the optimizer has changed the model, for the mode ``on_change``."""
        self._changed = True

    @staticmethod
    def epoch_to_step(epoch: float, steps_per_epoch: int) -> int:
        """Return the nearest step to a point in epochs.

        >>> LoggerManager.epoch_to_step(0.29, 100)
        29
        """
        return round(epoch * steps_per_epoch)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> bool:
        """Call :meth:`MetricLogging.log_hyperparams`."""
        return self.metric.log_hyperparams(*args, **kwargs)

    def log_scalar(self, *args: Any, **kwargs: Any) -> bool:
        """Call :meth:`MetricLogging.log_scalar`."""
        return self.metric.log_scalar(*args, **kwargs)

    def log_scalars(self, *args: Any, **kwargs: Any) -> bool:
        """Call :meth:`MetricLogging.log_scalars`."""
        return self.metric.log_scalars(*args, **kwargs)

    def log_string(self, *args: Any, **kwargs: Any) -> bool:
        """Call :meth:`SystemLogging.log_string`."""
        return self.system.log_string(*args, **kwargs)

    def save(self, file_path: str, **kwargs: Any) -> bool:
        """Store a file with every logger; return True if any of them did."""
        return any([each.save(file_path, **kwargs) for each in self._loggers])

    def _position(self, step: int, epoch: float | None) -> float:
        return epoch if self.frequency_type == "epoch" and epoch is not None else step


class MetricLogging:
    """Logs metrics with every logger of a manager. Methods return True if any of them did."""

    def __init__(self, manager: LoggerManager) -> None:
        self._manager = manager

    def log_hyperparams(self, params: Mapping[str, Any], level: Level = None) -> bool:
        """Log the hyperparameters of the run."""
        return any([each.log_hyperparams(params, level) for each in self._manager])

    def log_scalar(
        self,
        tag: str,
        value: float,
        step: int | None = None,
        wall_time: float | None = None,
        level: Level = None,
    ) -> bool:
        """Log one number."""
        return any([each.log_scalar(tag, value, step, wall_time, level) for each in self._manager])

    def log_scalars(
        self,
        tag: str,
        values: Mapping[str, float],
        step: int | None = None,
        wall_time: float | None = None,
        level: Level = None,
    ) -> bool:
        """Log a group of numbers."""
        return any(
            [each.log_scalars(tag, values, step, wall_time, level) for each in self._manager]
        )

    add_scalar = log_scalar
    add_scalars = log_scalars


class SystemLogging:
    """Logs messages with every logger of a manager. Methods return True if any of them did."""

    def __init__(self, manager: LoggerManager) -> None:
        self._manager = manager

    def log_string(
        self,
        tag: str,
        string: str,
        step: int | None = None,
        wall_time: float | None = None,
        level: Level = None,
    ) -> bool:
        """Log a text."""
        return any([each.log_string(tag, string, step, wall_time, level) for each in self._manager])

    def debug(self, tag: str, string: str) -> bool:
        """Log a text at the level DEBUG."""
        return self.log_string(tag, string, level=logging.DEBUG)

    def info(self, tag: str, string: str) -> bool:
        """Log a text at the level INFO."""
        return self.log_string(tag, string, level=logging.INFO)

    def warning(self, tag: str, string: str) -> bool:
        """Log a text at the level WARNING."""
        return self.log_string(tag, string, level=logging.WARNING)

    def error(self, tag: str, string: str) -> bool:
        """Log a text at the level ERROR."""
        return self.log_string(tag, string, level=logging.ERROR)

    def critical(self, tag: str, string: str) -> bool:
        """Log a text at the level CRITICAL."""
        return self.log_string(tag, string, level=logging.CRITICAL)


def _check_choice(argument: str, given: str, options: Iterable[str]) -> None:
    if given not in options:
        raise ArgumentError(f"There is no {argument} {given!r}.", did_you_mean(given, options))


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, BaseLogger):
        return [given]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(f"{given!r} is no list of loggers.", "Give loggers in a list.")
    return list(given)


def _checked(logger: Any) -> BaseLogger:
    if not isinstance(logger, BaseLogger):
        raise ArgumentError(
            f"{logger!r} is not a logger.", "Derive it from llmcompressor.metrics.BaseLogger."
        )
    return logger
