# SPDX-License-Identifier: Apache-2.0
"""The package's logger, configured once and only on request.

Importing the package changes nothing. The first run of a process that has set up no log of its own
shows on standard error only its progress, its summary and warnings (:func:`show_runs_quietly`);
:func:`configure_logger` shows more, and so does ``LLM_COMPRESSOR_LOG_LEVEL=INFO``.

The module forwards to its logger: ``from llmcompressor import logger; logger.info("...")`` works,
as does ``from llmcompressor.logger import logger``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from loguru import logger

__all__ = [
    "LoggerConfig",
    "configure_distributed_logger",
    "configure_logger",
    "is_quiet",
    "log_progress",
    "log_to_file",
    "logger",
    "others_in_log",
    "quiet",
    "show_runs_quietly",
]

_FILE_VARIABLE = "LLM_COMPRESSOR_LOG_FILE"
_FILE_LEVEL_VARIABLE = "LLM_COMPRESSOR_LOG_FILE_LEVEL"
_DEFAULT_FILE = "llmcompressor.log"
_FILES: list[str] = []
"""Where :func:`configure_logger` has the log written to."""
_RANKS: list[int] = []
"""Of this process, where :func:`configure_logger` has each line told with it."""
_listening: list[_Listening] = []
"""The runs of this process that note their warnings, the outermost first."""

_LINE = "<level>{level: <7}</level> {message}"
_FILE_LINE = "{time:YYYY-MM-DD HH:mm:ss.SSS} {level: <8} {name}:{line} {message}"
_METRIC = "METRIC"
_METRIC_SEVERITY = 38  # between WARNING and ERROR
PASSING = "passing"
"""Among the extra values of a record: it is about this moment, and nothing for a later one."""
PROGRESS = "PROGRESS"
_PROGRESS_SEVERITY = 22  # between INFO and SUCCESS
_TOLD_PLAINLY = (PROGRESS, "SUCCESS")
"""Levels of what a run tells its user; on the console these lines have no label."""


@dataclass
class LoggerConfig:
    """The configuration of the log.

    Attributes:
        disabled: log nothing at all.
        console_log_level: minimum level on standard error; ``None`` for no console.
        log_file: also write the log to this file, one JSON object per line.
        log_file_level: minimum level in the file, by default ``"INFO"``; without a file, that of
            ``llmcompressor.log``.
        metrics_disabled: drop records of the level ``"METRIC"``.
        rank: the rank of this process, written before each line of the console.
    """

    disabled: bool = False
    console_log_level: str | None = "INFO"
    log_file: str | Path | None = None
    log_file_level: str | None = None
    metrics_disabled: bool = False
    rank: int | None = None


def configure_logger(
    logger_config: LoggerConfig | None = None, *, config: LoggerConfig | None = None
) -> None:
    """Write this package's log to the console and, if requested, to a file.

    The environment variables ``LLM_COMPRESSOR_LOG_LEVEL``, ``LLM_COMPRESSOR_LOG_FILE``,
    ``LLM_COMPRESSOR_LOG_FILE_LEVEL`` and ``LLM_COMPRESSOR_LOG_DISABLED`` override the fields of the
    configuration. The file of the environment variable holds lines of text, by default from
    ``"DEBUG"`` on.

    Args:
        logger_config: the configuration of the log.
        config: an alias of ``logger_config``.
    """
    given = logger_config or config or LoggerConfig()
    disabled = os.environ.get("LLM_COMPRESSOR_LOG_DISABLED", "").lower()
    if disabled in {"1", "true"} if disabled else given.disabled:
        logger.disable("llmcompressor")
        return
    logger.enable("llmcompressor")
    logger.remove()
    _FILES.clear()
    _RANKS[:] = [] if given.rank is None else [given.rank]
    _register_level(_METRIC, _METRIC_SEVERITY)

    _add_console(given.console_log_level, given.rank, _Filter(metrics=not given.metrics_disabled))
    file_level = os.environ.get(_FILE_LEVEL_VARIABLE) or given.log_file_level
    if file := os.environ.get(_FILE_VARIABLE):
        logger.add(
            file,
            level=(file_level or "DEBUG").upper(),
            format=_FILE_LINE,
            filter=_Filter(metrics=not given.metrics_disabled),
        )
        _FILES.append(file)
    elif given.log_file or file_level:
        file = str(given.log_file or _DEFAULT_FILE)
        logger.add(
            file,
            level=(file_level or "INFO").upper(),
            serialize=True,
            filter=_Filter(metrics=not given.metrics_disabled),
        )
        _FILES.append(file)


def _add_console(level: str | None, rank: int | None, wanted: _Filter) -> None:
    """Write the log to standard error from a level on, as ``LLM_COMPRESSOR_LOG_LEVEL`` says."""
    level = os.environ.get("LLM_COMPRESSOR_LOG_LEVEL") or level
    if not level:
        return
    _register_level(PROGRESS, _PROGRESS_SEVERITY)

    def line(record: Any) -> str:
        told = "{message}" if record["level"].name in _TOLD_PLAINLY else _LINE
        return f"{'' if rank is None else f'[Rank {rank}] '}{told}\n{{exception}}"

    logger.add(
        lambda text: print(text, end="", file=sys.stderr),  # the one of now: above a bar
        level=level.upper(),
        format=line,
        filter=wanted,
        colorize=sys.stderr.isatty(),
    )


def show_runs_quietly() -> None:
    """Show only progress, summaries and warnings of runs, unless the process has set up its log.

    It has if loguru's default sink is gone, as after :func:`configure_logger`. Records of other
    packages are shown as before.
    """
    try:
        logger.remove(0)
    except ValueError:
        return
    logger.add(sys.stderr, filter=lambda record: not _is_of_run(record))
    _add_console(PROGRESS, None, _Filter(ours=True))


def _is_of_run(record: Any) -> bool:
    """Return True for records of this package and of compressed-tensors, which it calls."""
    return str(record["name"]).partition(".")[0] in {"llmcompressor", "compressed_tensors"}


def log_progress(text: str) -> None:
    """Log a line of the level ``"PROGRESS"``, which is shown where ``"INFO"`` is not."""
    _register_level(PROGRESS, _PROGRESS_SEVERITY)
    logger.opt(depth=1).log(PROGRESS, "{}", text)


def configure_distributed_logger(
    logger_config: LoggerConfig | None = None, *, config: LoggerConfig | None = None
) -> None:
    """Call :func:`configure_logger` with this process's rank in ``torch.distributed``."""
    import torch.distributed  # noqa: PLC0415  # logging does not need torch

    given = logger_config or config or LoggerConfig()
    configure_logger(replace(given, rank=torch.distributed.get_rank()))


class _Filter:
    """Filter of one sink's records.

    compressed-tensors marks repeated records about many modules, to be shown once.

    Args:
        metrics: pass records of the level ``"METRIC"``.
        ours: pass this package's records alone.
    """

    def __init__(self, *, metrics: bool = True, ours: bool = False) -> None:
        self._metrics, self._ours = metrics, ours
        self._once: set[tuple[str, str]] = set()

    def __call__(self, record: Any) -> bool:
        if self._ours and not str(record["name"]).startswith("llmcompressor"):
            return False
        if record["level"].name == _METRIC and not self._metrics:
            return False
        if not record["extra"].get("log_once"):
            return True
        said = (record["name"], record["message"])
        is_new = said not in self._once
        self._once.add(said)
        return is_new


def _register_level(name: str, severity: int) -> None:
    """Register a level of our own with loguru."""
    try:
        logger.level(name)
    except ValueError:
        logger.level(name, no=severity, color="<yellow>")


@contextmanager
def log_to_file(file: str | Path | None) -> Iterator[None]:
    """Also write the log to a file while the body runs.

    Args:
        file: the file; the environment variable ``LLM_COMPRESSOR_LOG_FILE`` overrides it. Records
            from the level ``LLM_COMPRESSOR_LOG_FILE_LEVEL`` on are written, by default ``"DEBUG"``.
    """
    place = os.environ.get(_FILE_VARIABLE) or file
    if place is None or str(place) in _FILES:
        yield
        return
    level = (os.environ.get(_FILE_LEVEL_VARIABLE) or "DEBUG").upper()
    sink = logger.add(str(place), level=level, format=_FILE_LINE, filter=_Filter())
    try:
        yield
    finally:
        logger.remove(sink)


@dataclass(eq=False)
class _Listening:
    """A run that notes its warnings, each distinct one once; a silent one logs nothing."""

    is_silent: bool
    warnings: dict[str, None]


_NOWHERE = SimpleNamespace(name="NOWHERE", no=-1, icon="")
"""A level that is below those of all sinks."""


@contextmanager
def quiet(*, wanted: bool = True) -> Iterator[Collection[str]]:
    """Suppress the log while the body runs, because another process logs the same.

    Where lines show the rank of their process, all processes go on logging.

    Args:
        wanted: suppress the log; False only notes warnings.

    Yields:
        The warnings of the package so far, each distinct one once, for the process that logs.
    """
    if _RANKS:
        yield ()
        return
    core = cast("Any", logger)._core  # loguru tells its patcher nowhere else
    before, own = core.patcher, _Listening(wanted, {})

    def patch(record: Any) -> None:
        if before is not None:
            before(record)
        if str(record["name"]).partition(".")[0] == "llmcompressor":
            _note(record)

    if not _listening:  # that of the outermost run serves those within it
        core.patcher = patch
    _listening.append(own)
    try:
        yield own.warnings.keys()
    finally:
        _listening.remove(own)
        if not _listening:
            core.patcher = before


def _note(record: Any) -> None:
    """Note a warning, and keep the record of a quiet process from all sinks."""
    level = record["level"]
    if level.no >= logging.WARNING and level.name != _METRIC and not record["extra"].get(PASSING):
        for one in _listening:
            one.warnings.setdefault(record["message"])
    if is_quiet():
        record["level"] = _NOWHERE


def is_quiet() -> bool:
    """Return True inside :func:`quiet`, for output that is not logged."""
    return any(one.is_silent for one in _listening)


# --------------------
# Log lines of other libraries.

_WITH_HANDLERS = ("transformers", "datasets", "huggingface_hub", "accelerate", "trl")
"""Loggers that write to standard error by handlers of their own."""


class _ToLog(logging.Handler):
    """Logs records of other libraries at the level ``"INFO"``, with the library's name."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record."""
        library = record.name.partition(".")[0]
        logger.info("{}: {}", library, record.getMessage().strip())


@contextmanager
def others_in_log() -> Iterator[None]:
    """Have other libraries' log lines go to this package's log while the body runs.

    Left alone are loggers that somebody has asked for more than warnings, and all if the root
    logger has handlers: then the process has a log of its own.
    """
    root = logging.getLogger()
    if root.handlers:  # also within another run
        yield
        return
    handler = _ToLog()
    with ExitStack() as stack:
        root.addHandler(handler)  # without any, Python writes warnings to standard error
        stack.callback(root.removeHandler, handler)
        for name in _WITH_HANDLERS:
            one = logging.getLogger(name)
            if one.handlers and one.getEffectiveLevel() >= logging.WARNING:
                stack.callback(_set_handlers, one, list(one.handlers))
                _set_handlers(one, [] if one.propagate else [handler])
        yield


def _set_handlers(one: logging.Logger, handlers: list[logging.Handler]) -> None:
    one.handlers[:] = handlers


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(logger, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(logger, name)
