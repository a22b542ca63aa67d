# SPDX-License-Identifier: Apache-2.0
"""Conversion of errors into one paragraph and an exit code, with a traceback on request."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from llmcompressor.errors import BudgetError, CompressorError, GateError
from llmcompressor.runtime.durable import errors_with_files

UNFORESEEN = 1
CANNOT_BE_USED = 2
REJECTED = 3
INTERRUPTED = 130
TERMINATED = 143

_SAME_SIGNAL = 5.0
"""Seconds in which a second SIGTERM means what the first one did; what it ended is cleaned up."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread so that the run ends as with Ctrl-C."""


@contextmanager
def report_errors(*, debug: bool, resumable: bool = False) -> Iterator[None]:
    """Convert errors of the body into a paragraph on standard error and an exit code.

    Args:
        debug: print the traceback as well.
        resumable: the same command resumes an interrupted run.
    """
    try:
        with _raise_on_sigterm(), errors_with_files():
            yield
    except (typer.Exit, typer.BadParameter):
        raise
    except KeyboardInterrupt as error:
        terminated = isinstance(error, _Terminated)
        what = "Terminated." if terminated else "Interrupted."
        # without what would discard the progress that there is
        typed = shlex.join(["llmcompressor", *sys.argv[1:]])
        command = typed.replace(" --resume never", "").replace(" --resume=never", "")
        _say(f"{what} Continue with: {command}" if resumable else what, debug)
        raise typer.Exit(TERMINATED if terminated else INTERRUPTED) from None
    except (BudgetError, GateError) as error:
        _say(f"Rejected: {error}", debug)
        raise typer.Exit(REJECTED) from None
    except CompressorError as error:
        _say(f"Error: {error}", debug)
        raise typer.Exit(CANNOT_BE_USED) from None
    except PermissionError as error:
        place = error.filename or error
        said = f"Error: There is no permission for {place}: the system says {error.strerror}."
        _say(f"{said} Change its permissions, or run as a user who has them.", debug)
        raise typer.Exit(CANNOT_BE_USED) from None
    except Exception as error:
        hint = "" if debug else " Run it again with --debug for the traceback."
        what = str(error).strip().rstrip(".") or "no message"
        _say(f"Error: unforeseen {type(error).__name__}: {what}.{hint}", debug)
        raise typer.Exit(UNFORESEEN) from None


@contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """Raise an exception on SIGTERM inside; only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last = -_SAME_SIGNAL

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SAME_SIGNAL:
            last = now
            raise _Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    typer.echo(message, err=True)
