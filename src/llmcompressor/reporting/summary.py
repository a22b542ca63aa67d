# SPDX-License-Identifier: Apache-2.0
"""The summary on the terminal at the end of a run, and what to do next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from llmcompressor.logger import logger, others_in_log, show_runs_quietly
from llmcompressor.reporting.contents import contents_of
from llmcompressor.reporting.page import data_of
from llmcompressor.reporting.report import PAGE_FILE, data_of_run, figures_of, next_commands
from llmcompressor.runtime.progress import hide_tqdm_bars, join_names
from llmcompressor.runtime.run_record import recording_run, run_record

_is_left_out = ContextVar("_is_left_out", default=False)


@contextmanager
def summary_left_out() -> Iterator[None]:
    """Tell no summary of the runs of the body, whose output is removed afterwards."""
    token = _is_left_out.set(True)
    try:
        yield
    finally:
        _is_left_out.reset(token)


@contextmanager
def told_run() -> Iterator[None]:
    """Record the run of the body, and keep the terminal to what the run tells its user.

    That is one line of progress, warnings, and what :func:`tell_summary` tells.
    """
    show_runs_quietly()
    with recording_run(), others_in_log(), hide_tqdm_bars():
        yield


def tell_summary(folder: str | os.PathLike[str]) -> None:
    """Log what the run that goes on has written, as a table, at the level ``"SUCCESS"``.

    A summary that cannot be made is told of, and the checkpoint is kept.

    Args:
        folder: the checkpoint.
    """
    if _is_left_out.get():
        return
    try:
        lines = summary_lines(Path(folder))
    except Exception as error:  # of any kind: the run has succeeded
        logger.error(f"No summary of {folder} could be made: {error!r:.500}")
        return
    logger.success("{}", "\n".join(lines))


def summary_lines(folder: Path) -> list[str]:
    """Return the lines of the summary of a checkpoint.

    Raises:
        CheckpointError: the folder holds no checkpoint, or half of one.
    """
    contents = contents_of(folder)
    shown = _as_typed(folder)
    page = shown / PAGE_FILE
    data = {**data_of(page), **data_of_run(run_record())}
    figures = figures_of(contents, list(contents.matrices.values()), data)
    rows = [(one.name, one.value) for one in figures]
    rows += _of_schemes(contents.matrices)
    verdict = contents.report.get("verification") or {}
    found = [one for one in verdict.get("findings") or [] if one.get("severity") == "warning"]
    warned = sum(len(one.get("modules") or [""]) for one in found)
    counts = {"warnings": len(data.get("warnings") or []), "warnings of verify": warned}
    for what, count in counts.items():
        if count:
            rows.append((what, f"{count}, on the page" if page.is_file() else str(count)))
    if contents.report.get("left_behind"):  # files of the source
        rows.append(("not copied", join_names(contents.report["left_behind"], 3)))
    if page.is_file():
        rows.append(("report", str(page)))
    rows.append(("next", next_commands(shlex.quote(str(shown)), verdict)[0]))
    width = max(cell_len(name) for name, _ in rows) + 2
    return [f"{shown}", *(f"  {name:<{width}}{value}" for name, value in rows)]


def _as_typed(folder: Path) -> Path:
    """Return a folder below the working folder relative to it."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _of_schemes(matrices: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return how many modules have which scheme, the most frequent first."""
    counts: dict[str, int] = {}
    for one in matrices.values():
        counts[one.scheme] = counts.get(one.scheme, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [("scheme", f"{name}, {count} times") for name, count in ordered]
