# SPDX-License-Identifier: Apache-2.0
"""An error as one paragraph and an exit code; the traceback only for who asked for it."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from llmcompressor.errors import CompressorError

__all__ = ["CANNOT_BE_USED", "INTERRUPTED", "UNFORESEEN", "reporting"]

UNFORESEEN = 1
CANNOT_BE_USED = 2
INTERRUPTED = 130


@contextmanager
def reporting(*, debug: bool, resumable: bool = False) -> Iterator[None]:
    """Turn what the body raises into a paragraph on standard error and an exit code.

    Args:
        debug: print the traceback as well.
        resumable: the same command continues where it was interrupted.
    """
    try:
        yield
    except (typer.Exit, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        command = shlex.join(["llmcompressor", *sys.argv[1:]])
        _say(f"Interrupted. Continue with: {command}" if resumable else "Interrupted.", debug)
        raise typer.Exit(INTERRUPTED) from None
    except CompressorError as error:
        _say(f"Error: {error}", debug)
        raise typer.Exit(CANNOT_BE_USED) from None
    except Exception as error:
        hint = "" if debug else " Run it again with --debug for the traceback."
        what = str(error).strip().rstrip(".") or "no message"
        _say(f"Error: unforeseen {type(error).__name__}: {what}.{hint}", debug)
        raise typer.Exit(UNFORESEEN) from None


def _say(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    typer.echo(message, err=True)
