# SPDX-License-Identifier: Apache-2.0
"""Names of what is there for a while, by which a later process finds what a killed one has left.

They end with ``-MACHINE-PROCESS-ANYTHING``. What belongs to a process that has ended is left; that
of other machines, which may see the same folder, is never touched.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from llmcompressor.logger import logger


def owner() -> str:
    """Return ``MACHINE-PROCESS`` of this process."""
    return f"{_machine()}-{os.getpid()}"


def _machine() -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())


def is_left(name: str, what: str) -> bool:
    """Return True for a name ``WHAT-MACHINE-PROCESS-…`` of a process of this machine that ended."""
    match = re.fullmatch(rf"{re.escape(what)}-{_machine()}-(\d+)-\w+", name)
    return match is not None and not psutil.pid_exists(int(match.group(1)))


@contextmanager
def temporary_folder(what: str, place: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, which is removed at the end, as are those that killed processes left.

    Args:
        what: how their names begin.
        place: where it is; by default the folder for temporary files.
    """
    beside = Path(tempfile.gettempdir() if place is None else place)
    for path in list(beside.iterdir()):
        if is_left(path.name, what) and _is_own_folder(path):
            logger.info(f"Removing {path}, left by a process that was killed.")
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{what}-{owner()}-", dir=beside) as made:
        yield Path(made)


def _is_own_folder(path: Path) -> bool:
    """Return True for a folder of this user; others may write to a folder for temporary files."""
    try:
        return path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid()
    except OSError:
        return False
