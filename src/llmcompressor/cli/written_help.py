# SPDX-License-Identifier: Apache-2.0
"""Prerendered help of every command.

Composing it needs typer and all options, which takes half a second. So it is stored in
``data/help.json``, for terminals of 80 columns (and for output that is no terminal) and of 100 and
more; at other widths it is composed. ``python -m llmcompressor.cli.written_help`` writes the file,
and a test compares it with typer's output.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["WIDTHS", "composed", "written_help"]

FILE = Path(__file__).parents[1] / "data" / "help.json"
WIDTHS = (80, 100)
"""Columns of a terminal; the text of the widest is for all that are wider."""
_ASKING = ("-h", "--help")


def written_help(arguments: Sequence[str]) -> str | None:
    """Return the output of ``llmcompressor --help`` or ``llmcompressor COMMAND --help``.

    Args:
        arguments: the command line arguments.

    Returns:
        The text; ``None`` for other arguments, or if it has to be composed.
    """
    if not arguments or arguments[-1] not in _ASKING or len(arguments) > 2:
        return None
    columns = min(shutil.get_terminal_size().columns, max(WIDTHS))
    if columns not in WIDTHS:
        return None
    import json  # noqa: PLC0415  # import as little as possible

    texts: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8"))
    return texts[str(columns)].get(arguments[0] if len(arguments) == 2 else "")


def composed(columns: int) -> dict[str, str]:
    """Return the help of each command as typer renders it; ``""`` for the application."""
    from llmcompressor.cli.app import app  # noqa: PLC0415

    def asked(*command: str) -> str:
        out = io.StringIO()
        with _wide(columns), contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            app(args=[*command, "--help"], prog_name="llmcompressor")
        return out.getvalue()

    commands = [one.name for one in app.registered_commands if one.name]
    return {"": asked()} | {name: asked(name) for name in commands}


@contextlib.contextmanager
def _wide(columns: int) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _write() -> None:
    import json  # noqa: PLC0415

    texts = {str(columns): composed(columns) for columns in WIDTHS}
    FILE.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
