# SPDX-License-Identifier: Apache-2.0
"""The lock of a folder that one process works in.

The lock is that of an open file (``flock``), so it goes with its process. Three things need care.
The file may be removed, and made anew by another process, between the moment when it is opened and
that when it is locked: then the lock holds nothing, and is taken again. A process that is forked
shares the open file and would keep the lock when its parent has ended, so it closes the file first.
A link in its place leads to a file of somebody else, and is not opened.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from llmcompressor.errors import OutputError
from llmcompressor.runtime.durable import errors_naming

try:
    import fcntl
except ImportError as error:
    raise ImportError(
        "A run locks the folder that it writes to with Python's fcntl, which this system has not: "
        "llmcompressor runs on Linux and macOS."
    ) from error

_held: set[int] = set()
"""Handles of the locks of this process."""
_SECONDS_TO_FORK = 1.0
"""Within which a process that is forked closes what it shares with its parent."""


def _close_in_child() -> None:
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Hold the lock of a file, which is created, until the block or the process ends.

    Args:
        file: in a folder that exists; a folder that is removed meanwhile is created anew.
        what: the thing that the lock is for, in the error.

    Raises:
        OutputError: another run holds it, or it is a link.
    """
    handle = _take(file, what)
    _held.add(handle)
    try:
        yield
    finally:
        if handle in _held:  # else this is a forked process
            _held.discard(handle)
            os.close(handle)


def _take(file: Path, what: str) -> int:
    until = time.monotonic() + _SECONDS_TO_FORK
    while True:
        try:
            handle = _open(file)
        except FileNotFoundError:  # another run that has ended has removed the folder
            if file.parent.is_symlink():
                raise
            with suppress(FileExistsError):  # a third one has made it
                file.parent.mkdir(parents=True, exist_ok=True)
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(handle, file):
                os.ftruncate(handle, 0)
                os.pwrite(handle, str(os.getpid()).encode(), 0)
                return handle
        except BlockingIOError as error:
            owner = os.pread(handle, 20, 0).decode(errors="replace").strip()
            os.close(handle)
            if _is_leaving(owner, file) and time.monotonic() < until:
                time.sleep(0.01)
                continue
            raise OutputError(
                f"Another run{_who(owner)} is writing {what}.",
                "Wait for it, or choose another output directory.",
            ) from error
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # of a file that another run has removed


def _open(file: Path) -> int:
    try:
        with errors_naming(file):
            return os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OutputError(
            f"{file} is a link, and a run would write to the file that it leads to.",
            f"Remove {file.parent}, or choose another output directory.",
        ) from error


def _is_still(handle: int, file: Path) -> bool:
    """Return True if the locked file has its name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _is_leaving(owner: str, file: Path) -> bool:
    """Return True if only what this process has just forked can hold the lock, for a moment."""
    return owner == str(os.getpid()) and not any(_is_still(handle, file) for handle in _held)


def _who(owner: str) -> str:
    if not owner.isdigit():
        return ""
    if psutil.pid_exists(int(owner)):
        return f" (process {owner})"
    return f", on another machine or begun by process {owner}, which has ended here,"
