# SPDX-License-Identifier: Apache-2.0
"""The command ``llmcompressor``: parses arguments, calls an entrypoint, prints the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit the process with its exit code.

    0: success. 1: an unforeseen error, or an error found by `plan` or `verify`. 2: unusable input.
    130: interrupted. 143: terminated.
    """
    from llmcompressor.cli.written_help import written_help  # noqa: PLC0415  # `cli` stays free

    text = written_help(sys.argv[1:] if arguments is None else arguments)
    if text is not None:
        sys.stdout.write(text)
        raise SystemExit(0)
    from llmcompressor.cli.app import app  # noqa: PLC0415

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # scripts are warned instead
    app(args=None if arguments is None else list(arguments), prog_name="llmcompressor")
