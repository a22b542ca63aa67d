# SPDX-License-Identifier: Apache-2.0
"""The pretended device, compiled once, and processes that have it."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.device.pretended import compile_device


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled device: made by the first process of a session that wants it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if folder.name.startswith("popen-") else folder  # shared by workers
    with (folder / "device.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made, refused = folder / "pretended.so", folder / "pretended.txt"
        if not made.is_file() and not refused.is_file():
            try:
                compile_device(folder)
            except RuntimeError as error:
                refused.write_text(str(error))
    if refused.is_file():
        pytest.skip(f"No device can be pretended here: {refused.read_text()}")
    return made


@pytest.fixture
def on_device(library: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a function of ``tests/device/runs.py`` in a process with the device; what it returns."""

    def run(name: str, /, **arguments: Any) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.device.runs"]
        command += [str(library), str(tmp_path), name, json.dumps(arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run
