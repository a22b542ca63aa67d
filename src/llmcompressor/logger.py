# SPDX-License-Identifier: Apache-2.0
"""One logger for the package, set up once and only when asked.

Importing the package changes nothing: loguru's default sink stays as it is until an entrypoint
or the user calls :func:`configure_logger`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

__all__ = ["LoggerConfig", "configure_logger", "logged_to", "logger"]

_FILE_VARIABLE = "LLM_COMPRESSOR_LOG_FILE"
_FILES: list[str] = []
"""Where :func:`configure_logger` has the log written to."""

_LINE = "<level>{level: <7}</level> {message}"
_FILE_LINE = "{time:YYYY-MM-DD HH:mm:ss.SSS} {level: <8} {name}:{line} {message}"


@dataclass(frozen=True)
class LoggerConfig:
    """What is logged, and where.

    Attributes:
        disabled: log nothing at all.
        console_log_level: least level on standard error; ``None`` for no console.
        log_file: also write everything from ``log_file_level`` on to this file.
        log_file_level: least level in the file.
    """

    disabled: bool = False
    console_log_level: str | None = "INFO"
    log_file: str | Path | None = None
    log_file_level: str = "DEBUG"


def configure_logger(config: LoggerConfig | None = None) -> None:
    """Send this package's log to the console and, if asked, to a file.

    The environment variables ``LLM_COMPRESSOR_LOG_LEVEL``, ``LLM_COMPRESSOR_LOG_FILE`` and
    ``LLM_COMPRESSOR_LOG_DISABLED`` override the fields of ``config``.
    """
    config = config or LoggerConfig()
    disabled = os.environ.get("LLM_COMPRESSOR_LOG_DISABLED", "").lower() in {"1", "true"}
    if config.disabled or disabled:
        logger.disable("llmcompressor")
        return
    logger.enable("llmcompressor")
    logger.remove()
    _FILES.clear()
    level = os.environ.get("LLM_COMPRESSOR_LOG_LEVEL") or config.console_log_level
    if level:
        logger.add(sys.stderr, level=level.upper(), format=_LINE)
    file = os.environ.get(_FILE_VARIABLE) or config.log_file
    if file:
        logger.add(str(file), level=config.log_file_level.upper(), format=_FILE_LINE)
        _FILES.append(str(file))


@contextmanager
def logged_to(file: str | Path | None) -> Iterator[None]:
    """Also write everything that is logged to a file while the body runs.

    Args:
        file: which; the environment variable ``LLM_COMPRESSOR_LOG_FILE`` overrides it.
    """
    place = os.environ.get(_FILE_VARIABLE) or file
    if place is None or str(place) in _FILES:
        yield
        return
    sink = logger.add(str(place), level="DEBUG", format=_FILE_LINE)
    try:
        yield
    finally:
        logger.remove(sink)
