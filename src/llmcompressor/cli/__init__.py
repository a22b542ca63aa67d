# SPDX-License-Identifier: Apache-2.0
"""The command ``llmcompressor``: parses arguments, calls an entrypoint, prints the result."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit the process with its exit code.

    0: success. 1: an unforeseen error, or an error found by `plan` or `verify`. 2: unusable input.
    130: interrupted. 143: terminated.
    """
    from llmcompressor.cli.app import app  # noqa: PLC0415  # `cli` stays free

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # scripts are warned instead
    app(args=None if arguments is None else list(arguments), prog_name="llmcompressor")
