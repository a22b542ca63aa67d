# SPDX-License-Identifier: Apache-2.0
"""The command ``llmcompressor``: reads arguments, calls an entrypoint, prints what came of it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave the process with its exit code.

    0: done. 1: something unforeseen, or an error found by `plan` or `verify`. 2: what was given
    cannot be used. 130: interrupted. 143: terminated.
    """
    from llmcompressor.cli.app import app  # noqa: PLC0415  # importing `cli` stays free

    app(args=None if arguments is None else list(arguments), prog_name="llmcompressor")
