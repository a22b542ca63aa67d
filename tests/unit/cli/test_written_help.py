# SPDX-License-Identifier: Apache-2.0
"""Help that was written beforehand is what typer would compose, and loads next to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from llmcompressor.cli import main
from llmcompressor.cli.app import app
from llmcompressor.cli.written_help import FILE, WIDTHS, composed, written_help


@pytest.mark.parametrize("columns", WIDTHS)
def test_it_is_what_typer_composes(columns: int) -> None:
    texts = json.loads(FILE.read_text())
    assert texts[str(columns)] == composed(columns), (
        "Write it anew: python -m llmcompressor.cli.written_help"
    )
    assert set(texts[str(columns)]) == {"", *(one.name for one in app.registered_commands)}


@pytest.mark.parametrize("columns", [100, 180])
@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["oneshot", "--help"], ["demo", "-h"]])
def test_the_command_prints_it(
    arguments: list[str],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0
    command = arguments[0] if len(arguments) == 2 else ""
    assert capsys.readouterr().out == json.loads(FILE.read_text())["100"][command]


@pytest.mark.parametrize(
    "arguments", [[], ["--version"], ["oneshot"], ["onesot", "--help"], ["oneshot", "m", "--help"]]
)
def test_whatever_else_is_asked_is_left_to_typer(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert written_help(arguments) is None


def test_a_width_between_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "91")
    assert written_help(["--help"]) is None


def test_help_loads_neither_typer_nor_torch() -> None:
    code = (
        "import atexit, sys; from llmcompressor.cli import main\n"
        "heavy = ('typer', 'pydantic', 'torch')\n"
        "atexit.register(lambda: print([one for one in heavy if one in sys.modules]))\n"
        "main(['oneshot', '--help'])"
    )
    environment = {**os.environ, "COLUMNS": "80"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.endswith("[]\n")
