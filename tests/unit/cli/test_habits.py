# SPDX-License-Identifier: Apache-2.0
"""What editors and shells ask of the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from llmcompressor.cli import main

_MAIN = "from llmcompressor.cli import main; main()"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("llmcompressor ver", "verify"), ("llmcompressor plan --rec", "--recipe")],
)
def test_a_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    environment = {**os.environ, **asked, "_LLMCOMPRESSOR_COMPLETE": "complete_bash"}
    told = subprocess.run(
        [sys.executable, "-c", _MAIN], env=environment, capture_output=True, text=True, check=True
    )
    assert offered in told.stdout.split()


def test_the_schema_is_written_for_an_editor(tmp_path: Path) -> None:
    file = tmp_path / "recipe.schema.json"
    with pytest.raises(SystemExit) as left:
        main(["schema", "--output", str(file)])
    assert left.value.code == 0
    packaged = files("llmcompressor") / "data" / "recipe.schema.json"
    assert file.read_bytes() == packaged.read_bytes()
    assert json.loads(file.read_text())["title"] == "Recipe of llmcompressor"
