# SPDX-License-Identifier: Apache-2.0
"""``compression_report.json``: the report of a run, with those of earlier runs on its source."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmcompressor.checkpoint.model_config import write_json
from llmcompressor.logger import logger

__all__ = ["REPORT_FILE", "STORED_AS", "own_report", "write_report"]

REPORT_FILE = "compression_report.json"
STORED_AS = "stored_as"
"""Module → its names in the files, where these are others; what is recorded goes by modules."""
_EARLIER = "before"
_OF_FILES = "verification"
"""What a report says of the files beside it; of other files it says nothing."""


def write_report(
    folder: Path,
    report: Mapping[str, Any] | None,
    source: Path | None,
    check: Callable[[Path], Mapping[str, Any]] | None,
) -> None:
    """Write the report of a run; no file if it is empty.

    Args:
        folder: the output, otherwise complete.
        report: the run's report.
        source: the folder of the source model, whose report is nested in this one.
        check: verify the output and return findings, which become part of the report.
    """
    content = dict(report or {})
    earlier = _report_of(source)
    if earlier:
        content[_EARLIER] = earlier
    if check is not None:
        content[_OF_FILES] = dict(check(folder))
    if content:
        write_json(folder / REPORT_FILE, content)


def own_report(folder: Path) -> dict[str, Any] | None:
    """Return the report of the run that wrote ``folder``, without earlier ones."""
    found = _report_of(folder)
    return {key: value for key, value in found.items() if key != _EARLIER} or None


def _report_of(source: Path | None) -> dict[str, Any]:
    file = None if source is None else source / REPORT_FILE
    if file is None or not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning(f"{file} cannot be read, and what it tells is lost: {error!r:.200}")
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if key != _OF_FILES}
