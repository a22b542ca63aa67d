# SPDX-License-Identifier: Apache-2.0
"""Metric loggers, each for one backend."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

from llmcompressor.errors import InputError
from llmcompressor.logger import logger as package_logger

__all__ = [
    "BaseLogger",
    "Entry",
    "LambdaLogger",
    "PythonLogger",
    "SparsificationGroupLogger",
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

    @staticmethod
    def available() -> bool:
        """Return True if TensorBoard is installed."""
        return _installed("tensorboard")

    def write(self, entry: Entry) -> bool:
        """Write the entry as a scalar, as scalars with the tag before their names, or as text."""
        when = {"global_step": entry.step, "walltime": entry.wall_time}
        if entry.values is None and not isinstance(entry.value, str):
            self.writer.add_scalar(entry.tag, entry.value, **when)
        elif entry.values is not None and _all_numbers(entry.values):
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

    @staticmethod
    def available() -> bool:
        """Return True if wandb is installed."""
        return _installed("wandb")

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
            self.loggers.append(_tensorboard_logger(tensorboard, name))
        if wandb_ is not None and wandb_ is not False:
            self.loggers.append(WANDBLogger(None if wandb_ is True else wandb_, name=name))

    def write(self, entry: Entry) -> bool:
        """Log the entry with every logger; return True if any of them logged it."""
        return any([each.write(entry) for each in self.loggers])

    def log_hyperparams(self, params: Mapping[str, Any], level: Level = None) -> bool:
        """Log the hyperparameters with every logger; return True if any did."""
        return self.enabled and any([each.log_hyperparams(params, level) for each in self.loggers])

    def save(self, file_path: str, **kwargs: Any) -> bool:
        """Store a file with every logger; return True if any did."""
        return self.enabled and any([each.save(file_path, **kwargs) for each in self.loggers])


def _tensorboard_logger(given: Any, name: str) -> TensorBoardLogger:
    if given is True:
        return TensorBoardLogger(name=name)
    if isinstance(given, str | Path):
        return TensorBoardLogger(log_path=given, name=name)
    return TensorBoardLogger(writer=given, name=name)


def _all_numbers(values: Mapping[str, Any]) -> bool:
    return all(isinstance(value, Real) for value in values.values())


def _installed(module: str) -> bool:
    return module in sys.modules or find_spec(module) is not None


def _optional(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Logging to {extra} needs a package that is not installed ({error.name}). "
            f"Run: pip install 'llmcompressor[{extra}]'"
        ) from error
