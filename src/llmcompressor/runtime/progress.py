# SPDX-License-Identifier: Apache-2.0
"""Progress of a long job: one line with a bar on a terminal, otherwise an occasional log line.

::

    with progress(len(blocks), "Compressing") as advance:
        for block in blocks:
            advance(0, note=block.name)  # the block now at work, not yet counted
            compress(block)
            advance()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tqdm import tqdm

from llmcompressor.logger import is_quiet, log_progress

_LOG_EVERY_S = 10.0
_LOG_EVERY_SHARE = 0.05
"""Of the time elapsed: a job of hours does not log thousands of lines."""

# The line already on screen: a job within a job is told in its note.
_shown: ContextVar[tuple[Progress, TaskID] | None] = ContextVar(
    "llmcompressor_progress", default=None
)


class Advance(Protocol):
    """The callable that :func:`progress` yields."""

    def __call__(self, by: int = 1, note: str | None = None) -> None:
        """Count ``by`` steps as done; ``note`` replaces the note, none keeps it."""


class _LogLines:
    """Progress without a terminal: a log line every ten seconds, in long jobs less often."""

    def __init__(self, total: int, description: str, clock: Callable[[], float]) -> None:
        self._total = total
        self._description = description
        self._clock = clock
        self._start = self._last = clock()
        self._done = 0
        self._note = ""

    def __call__(self, by: int = 1, note: str | None = None) -> None:
        self._done += by
        self._note = self._note if note is None else note
        now = self._clock()
        elapsed = now - self._start
        if now - self._last < max(_LOG_EVERY_S, _LOG_EVERY_SHARE * elapsed):
            return
        self._last = now
        known = 0 < self._done <= self._total
        left = elapsed / self._done * (self._total - self._done) if known else None
        note = f" ({self._note})" if self._note else ""
        rest = "?" if left is None else _minutes(left)
        log_progress(
            f"{self._description}: {self._done}/{self._total}{note}, "
            f"{_minutes(elapsed)} elapsed, {rest} left"
        )


def _minutes(seconds: float) -> str:
    """Format seconds as minutes and seconds.

    >>> _minutes(83.4)
    '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def progress(
    total: int,
    description: str,
    *,
    terminal: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Show the progress of a job of ``total`` steps while the body runs.

    A bar (``terminal`` true; by default if standard error is one) or log lines by a clock in
    seconds. Yields ``advance(by=1, note=None)``, which counts ``by`` steps as done and shows
    ``note``, usually the name of the current module.
    """
    outer = _shown.get()
    terminal = Console(stderr=True).is_terminal if terminal is None else terminal
    if is_quiet() or (outer is None and not terminal):
        yield _LogLines(total, description, clock)  # which are not shown if quiet
    elif outer is not None:
        yield _in_note(*outer, total, description)
    else:
        columns = (
            *(TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()),
            *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
            TextColumn("[dim]{task.fields[note]}"),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as display:
            line = display.add_task(description, total=total, note="")
            token = _shown.set((display, line))
            try:
                yield _on_line(display, line)
            finally:
                _shown.reset(token)


def _on_line(display: Progress, line: TaskID) -> Advance:
    """Return the callable of the job that has the line."""

    def advance(by: int = 1, note: str | None = None) -> None:
        if note is not None:
            display.update(line, note=note)
        display.advance(line, by)

    return advance


def _in_note(display: Progress, line: TaskID, total: int, description: str) -> Advance:
    """Return the callable of a job within the one that has the line."""
    done = 0

    def advance(by: int = 1, note: str | None = None) -> None:
        nonlocal done
        done += by
        display.update(line, note=f"{description} {done}/{total} {note or ''}".rstrip())

    return advance


@contextmanager
def hide_tqdm_bars() -> Iterator[None]:
    """Hide the progress bars of other libraries (all made with tqdm) inside, but for downloads.

    They would interrupt our own bar, and count steps that mean nothing to the user.
    """
    own = vars(tqdm)["__init__"]  # it may be a partial method of someone else
    original = tqdm.__init__

    def hidden(self: tqdm, *args: object, **kwargs: object) -> None:
        is_download = type(self).__module__.startswith("huggingface_hub")
        original(self, *args, **(kwargs if is_download else {**kwargs, "disable": True}))

    tqdm.__init__ = hidden
    try:
        yield
    finally:
        tqdm.__init__ = own


# --------------------
# Formatting of lists in messages.


def join_names(names: Iterable[str], most: int = 6, separator: str = ", ") -> str:
    """Join names for a message; of a long list the first ones and the number of the rest.

    >>> join_names("abcdefgh")
    'a, b, c, d, e, f and 2 more'
    >>> join_names(["a, b", "c", "d"], most=2, separator="; ")
    'a, b; c; and 1 more'
    """
    every = list(names)
    shown, rest = separator.join(every[:most]), len(every) - most
    if rest <= 0:
        return shown
    return f"{shown}{separator if separator != ', ' else ' '}and {rest} more"


# --------------------
# Formatting of sizes.


def format_bytes(size: int) -> str:
    """Format a number of bytes with a suitable unit.

    >>> format_bytes(7_348_736), format_bytes(1_319_560_307_784), format_bytes(0)
    ('7.35 MB', '1.32 TB', '0 B')
    """
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.3g} {unit}"
