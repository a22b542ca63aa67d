# SPDX-License-Identifier: Apache-2.0
"""Metric loggers, each for one backend."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any, Literal, SupportsFloat, get_args

from llmcompressor.errors import ArgumentError, InputError, did_you_mean
from llmcompressor.logger import logger as package_logger

__all__ = [
    "BaseLogger",
    "Entry",
    "FrequencyType",
    "LambdaLogger",
    "LoggerManager",
    "LoggingMode",
    "MetricLogging",
    "PythonLogger",
    "SparsificationGroupLogger",
    "SystemLogging",
    "TensorBoardLogger",
    "WANDBLogger",
]

Level = int | None
Write = Callable[
    [str, float | str | None, Mapping[str, Any] | None, int | None, float, Level], bool
]


@dataclass(frozen=True)
class Entry:
    """A log entry: either a ``value`` or several ``values`` by name.

    Attributes:
        tag: the name of the entry.
        value: a number or a text.
        values: numbers by name, or the hyperparameters of the run.
        step: optimizer steps taken.
        wall_time: seconds since 1970.
        level: the severity, as in ``logging``.
    """

    tag: str
    value: float | str | None = None
    values: Mapping[str, Any] | None = None
    step: int | None = None
    wall_time: float = field(default_factory=time.time)
    level: Level = None


class BaseLogger:
    """Base of all metric loggers; a custom logger overrides :meth:`write`.

    Args:
        name: the logger's name.
        enabled: log anything at all.
    """

    def __init__(self, name: str, enabled: bool = True) -> None:
        self.name = name
        self.enabled = enabled

    def write(self, entry: Entry) -> bool:
        """Log one entry; return True if it was logged."""
        return False

    def save(self, file_path: str, **kwargs: Any) -> bool:
        """Store a file with the log; return True if it was stored."""
        return False

    def log_hyperparams(self, params: Mapping[str, Any], level: Level = None) -> bool:
        """Log the hyperparameters of the run; return True if they were logged."""
        return self._write("hyperparams", values=params, level=level)

    def log_scalar(
        self,
        tag: str,
        value: float,
        step: int | None = None,
        wall_time: float | None = None,
        level: Level = None,
    ) -> bool:
        """Log one number; return True if it was logged."""
        return self._write(tag, value=value, step=step, wall_time=wall_time, level=level)

    def log_scalars(
        self,
        tag: str,
        values: Mapping[str, float],
        step: int | None = None,
        wall_time: float | None = None,
        level: Level = None,
    ) -> bool:
        """Log a group of numbers; return True if they were logged."""
        return self._write(tag, values=values, step=step, wall_time=wall_time, level=level)

    def log_string(
        self,
        tag: str,
        string: str,
        step: int | None = None,
        wall_time: float | None = None,
        level: Level = None,
    ) -> bool:
        """Log a text; return True if it was logged."""
        return self._write(tag, value=string, step=step, wall_time=wall_time, level=level)

    def _write(self, tag: str, *, wall_time: float | None = None, **given: Any) -> bool:
        when = time.time() if wall_time is None else wall_time
        return self.enabled and self.write(Entry(tag, wall_time=when, **given))


def _forwarded(name: str) -> Callable[..., bool]:
    """A method of :class:`BaseLogger` that calls it on each logger that the object iterates."""

    @functools.wraps(getattr(BaseLogger, name))
    def forward(self: Iterable[BaseLogger], *args: Any, **kwargs: Any) -> bool:
        return any([getattr(each, name)(*args, **kwargs) for each in self])

    return forward


class LambdaLogger(BaseLogger):
    """A logger that calls a function.

    Args:
        lambda_func: called with tag, value, values, step, wall time and level; returns True if it
            logged them.
        name: the logger's name.
        enabled: log anything at all.
    """

    def __init__(self, lambda_func: Write, name: str = "lambda", enabled: bool = True) -> None:
        super().__init__(name, enabled)
        self.lambda_func = lambda_func

    def write(self, entry: Entry) -> bool:
        """Pass the entry to the function."""
        return self.lambda_func(
            entry.tag, entry.value, entry.values, entry.step, entry.wall_time, entry.level
        )


class PythonLogger(BaseLogger):
    """A logger that writes lines to a Python log.

    Args:
        logger: a logger of ``logging``; by default this package's own log.
        log_level: level of entries without one.
        name: the logger's name.
        enabled: log anything at all.
    """

    def __init__(
        self,
        logger: logging.Logger | None = None,
        log_level: int = logging.DEBUG,
        name: str = "python",
        enabled: bool = True,
    ) -> None:
        super().__init__(name, enabled)
        self.logger = logger
        self.log_level = log_level

    def write(self, entry: Entry) -> bool:
        """Write the entry as one line."""
        content = entry.value if entry.values is None else dict(entry.values)
        step = "" if entry.step is None else f" step {entry.step}"
        line = f"{self.name} {entry.tag}{step}: {content}"
        level = self.log_level if entry.level is None else entry.level
        if self.logger is None:
            # Levels of logging and of loguru agree where both have a name.
            package_logger.log(logging.getLevelName(level), "{}", line)
        else:
            self.logger.log(level, "%s", line)
        return True


def _installed(module: str) -> bool:
    """Return True if a module can be imported."""
    return module in sys.modules or find_spec(module) is not None


def _optional(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Logging to {extra} needs a package that is not installed ({error.name}). "
            f"Run: pip install 'llmcompressor[{extra}]'"
        ) from error


class TensorBoardLogger(BaseLogger):
    """A logger that writes event files for TensorBoard.

    Args:
        log_path: the directory to write to; by default TensorBoard's own.
        writer: a ``SummaryWriter`` to use instead.
        name: the logger's name.
        enabled: log anything at all.

    Raises:
        ImportError: TensorBoard is not installed.
        InputError: both a path and a writer are given.
    """

    def __init__(
        self,
        log_path: str | Path | None = None,
        writer: Any = None,
        name: str = "tensorboard",
        enabled: bool = True,
    ) -> None:
        super().__init__(name, enabled)
        if writer is not None and log_path is not None:
            raise InputError(
                "TensorBoardLogger got both a log_path and a writer.", "Give one of them."
            )
        if writer is None:
            module = _optional("torch.utils.tensorboard", "tensorboard")
            writer = module.SummaryWriter(log_dir=None if log_path is None else str(log_path))
        self.writer = writer

    available = staticmethod(functools.partial(_installed, "tensorboard"))

    def write(self, entry: Entry) -> bool:
        """Write the entry as a scalar, as scalars with the tag before their names, or as text."""
        when = {"global_step": entry.step, "walltime": entry.wall_time}
        if entry.values is None and not isinstance(entry.value, str):
            self.writer.add_scalar(entry.tag, entry.value, **when)
        elif entry.values is not None and all(isinstance(v, Real) for v in entry.values.values()):
            # One by one: add_scalars opens a file of events for each name and keeps it open.
            for name, value in entry.values.items():
                self.writer.add_scalar(f"{entry.tag}/{name}", value, **when)
        else:
            text = entry.value if entry.values is None else str(dict(entry.values))
            self.writer.add_text(entry.tag, text, **when)
        self.writer.flush()
        return True


class WANDBLogger(BaseLogger):
    """A logger that logs to Weights & Biases.

    Args:
        init_kwargs: arguments for starting a run; without them the active run is used: that of a
            Trainer with ``report_to="wandb"``, for instance.
        name: the logger's name.
        enabled: log anything at all.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(
        self,
        init_kwargs: Mapping[str, Any] | None = None,
        name: str = "wandb",
        enabled: bool = True,
    ) -> None:
        super().__init__(name, enabled)
        self.wandb = _optional("wandb", "wandb")
        self._own_run = init_kwargs is not None or self.wandb.run is None
        if self._own_run:
            self.wandb.init(**(init_kwargs or {}))

    available = staticmethod(functools.partial(_installed, "wandb"))

    def write(self, entry: Entry) -> bool:
        """Log the entry; several values get the tag before their names."""
        if entry.values is None:
            data: dict[str, Any] = {entry.tag: entry.value}
        else:
            data = {f"{entry.tag}/{name}": value for name, value in entry.values.items()}
        if self._own_run or entry.step is None:
            self.wandb.log(data, step=entry.step)
        else:
            # A run counts the calls of its owner as its steps, and drops entries with a lower
            # step. So the step is logged as a value, under the name that a Trainer has for it.
            self.wandb.log({**data, "train/global_step": entry.step})
        return True

    def log_hyperparams(self, params: Mapping[str, Any], level: Level = None) -> bool:
        """Add the hyperparameters to the run's configuration."""
        if self.enabled:
            self.wandb.config.update(dict(params))
        return self.enabled

    def save(self, file_path: str, **kwargs: Any) -> bool:
        """Store a file with the run."""
        if self.enabled:
            self.wandb.save(file_path, **kwargs)
        return self.enabled


class SparsificationGroupLogger(BaseLogger):
    """A logger that forwards to several others.

    Args:
        lambda_func: also call this function, as ``LambdaLogger`` does.
        python: also log to Python: true for this package's log, or a logger of ``logging``.
        python_log_level: level of entries without one.
        tensorboard: also write for TensorBoard: true, a directory or a ``SummaryWriter``.
        wandb_: also log to Weights & Biases: true, or arguments for starting a run.
        name: the logger's name.
        enabled: log anything at all.
    """

    def __init__(
        self,
        lambda_func: Write | None = None,
        python: bool | logging.Logger | None = None,
        python_log_level: int = logging.INFO,
        tensorboard: Any = None,
        wandb_: bool | Mapping[str, Any] | None = None,
        name: str = "sparsification",
        enabled: bool = True,
    ) -> None:
        super().__init__(name, enabled)
        self.loggers: list[BaseLogger] = []
        if lambda_func is not None:
            self.loggers.append(LambdaLogger(lambda_func, name=name))
        # Compared with None and False: a directory's or a mapping's truth is another matter.
        if python is not None and python is not False:
            given = None if python is True else python
            self.loggers.append(PythonLogger(given, python_log_level, name=name))
        if tensorboard is not None and tensorboard is not False:
            is_path = isinstance(tensorboard, str | Path)
            self.loggers.append(
                TensorBoardLogger(
                    tensorboard if is_path else None,
                    writer=None if is_path or tensorboard is True else tensorboard,
                    name=name,
                )
            )
        if wandb_ is not None and wandb_ is not False:
            self.loggers.append(WANDBLogger(None if wandb_ is True else wandb_, name=name))

    def __iter__(self) -> Iterator[BaseLogger]:
        return iter(self.loggers if self.enabled else ())

    write = _forwarded("write")
    log_hyperparams = _forwarded("log_hyperparams")
    save = _forwarded("save")


# --------------------
# The manager of a run's metric loggers and their frequency.

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
        if isinstance(loggers, BaseLogger):
            loggers = [loggers]
        if isinstance(loggers, str) or not isinstance(loggers, Iterable | None):
            raise ArgumentError(f"{loggers!r} is no list of loggers.", "Give loggers in a list.")
        self._loggers: list[BaseLogger] = []
        for each in loggers or ():
            self.add_logger(each)
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
        if not isinstance(logger, BaseLogger):
            raise ArgumentError(
                f"{logger!r} is not a logger.", "Derive it from llmcompressor.metrics.BaseLogger."
            )
        self._loggers.append(logger)

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

    log_hyperparams = _forwarded("log_hyperparams")
    log_scalar = _forwarded("log_scalar")
    log_scalars = _forwarded("log_scalars")
    log_string = _forwarded("log_string")
    save = _forwarded("save")

    def _position(self, step: int, epoch: float | None) -> float:
        return epoch if self.frequency_type == "epoch" and epoch is not None else step


class _Part:
    """Some methods of a manager's loggers. They return True if any logger logged."""

    def __init__(self, manager: LoggerManager) -> None:
        self._manager = manager

    def __iter__(self) -> Iterator[BaseLogger]:
        return iter(self._manager)


class MetricLogging(_Part):
    """Logs metrics with every logger of a manager."""

    log_hyperparams = _forwarded("log_hyperparams")
    log_scalar = add_scalar = _forwarded("log_scalar")
    log_scalars = add_scalars = _forwarded("log_scalars")


class SystemLogging(_Part):
    """Logs messages with every logger of a manager; ``debug`` to ``critical`` take tag and text."""

    log_string = _forwarded("log_string")
    debug = functools.partialmethod(log_string, level=logging.DEBUG)
    info = functools.partialmethod(log_string, level=logging.INFO)
    warning = functools.partialmethod(log_string, level=logging.WARNING)
    error = functools.partialmethod(log_string, level=logging.ERROR)
    critical = functools.partialmethod(log_string, level=logging.CRITICAL)


def _check_choice(argument: str, given: str, options: Iterable[str]) -> None:
    if given not in options:
        raise ArgumentError(f"There is no {argument} {given!r}.", did_you_mean(given, options))
