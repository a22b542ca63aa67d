# SPDX-License-Identifier: Apache-2.0
"""Files that outlast a loss of power, checksums that show damage, and errors that name a file.

A disk keeps what a process writes in an order of its own: a new name may be there before the
content that it stands for. So each change is made in one order: the content is written and synced,
the file gets its name, and the folder that holds the name is synced. After a cut at any moment the
old file is there or the new one, whole. A change that has returned is kept.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import xxhash

from llmcompressor.errors import CompressorError

_DESCRIPTOR = re.compile(r"_?(?:fd|fileno|handle|descriptor|\w+_fd)")
_OF_RUST = re.compile(r"\(os error (\d+)\)$")
_UNSYNCED_FOLDERS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
"""Errors of file systems that keep names by themselves and sync no folder."""


@contextmanager
def errors_naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give errors of the file system the name of a file, if they have none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextmanager
def errors_with_files() -> Iterator[None]:
    """Give errors of the file system the name of a file, whoever raises them inside.

    A call that has only the number of an open file cannot name it. But a function on the way to
    that call holds the file or its path. Errors that code in Rust tells by their number, such as
    those of safetensors and tokenizers, become OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = _file_in(error)
        raise
    except CompressorError:
        raise
    except Exception as error:
        number = _OF_RUST.search(str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), _file_in(error)) from error


def _file_in(error: BaseException) -> str | None:
    """Return the file that the innermost function of an error's traceback holds.

    Of what it holds an open file is surest, then a path. The longest is a file, not its folder.
    """
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        found: list[tuple[int, str]] = []
        for variable, value in frame.f_locals.items():
            held = getattr(value, "name", None) if isinstance(value, io.IOBase) else value
            if isinstance(held, int) and (held is not value or _DESCRIPTOR.fullmatch(variable)):
                held = os.path.realpath(f"/proc/self/fd/{held}")
                found += [(0, held)] if os.path.exists(held) else []
            elif isinstance(held, str) and (held is not value or os.path.isabs(held)):
                found.append((2 if held is value else 0, held))
            elif isinstance(held, os.PathLike):
                found.append((1, os.fspath(held)))
        if found:
            return min(found, key=lambda one: (one[0], -len(one[1])))[1]
    return None


def sync(path: Path) -> None:
    """Sync a file, or a folder and so the names in it, to the disk."""
    with errors_naming(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in _UNSYNCED_FOLDERS or not path.is_dir():
                raise
        finally:
            os.close(handle)


def sync_tree(folder: Path) -> None:
    """Sync all that is below a folder, the innermost first, then the folder."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.exists():  # a link may lead nowhere
            sync(path)
    sync(folder)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, each with its name on the disk."""
    missing = [path for path in (folder, *folder.parents) if not os.path.isdir(path)]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync(path.parent)


def append(file: Path, content: bytes) -> None:
    """Append to a file that exists under its name; a link is no such file."""
    with errors_naming(file):
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            _write(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)


def replace(file: Path, content: bytes | Callable[[Path], object], *, ending: str = ".new") -> None:
    """Give a file new content at once.

    Args:
        file: the old file stays as it is until the new one is complete.
        content: bytes, or a function that writes the file of the path that it is given.
        ending: what the name of the new file has besides; another one for each process, where
            several may write the file at the same time.
    """
    new = file.with_name(f"{file.name}{ending}")
    new.unlink(missing_ok=True)  # left by a kill, or a link to another place
    with errors_naming(new):
        if callable(content):
            content(new)
        else:
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                _write(handle, content)
            finally:
                os.close(handle)
    sync(new)
    new.replace(file)
    sync(file.parent)


def rename(path: Path, target: Path) -> None:
    """Rename a synced file or folder; it has one of the two names at any moment."""
    path.rename(target)
    sync(target.parent)
    if path.parent != target.parent:
        sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    sync(path.parent)


def _write(handle: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left) :]


# --------------------
# Checksums, by which damage shows before a file is used. A checksum is the size of a file and a
# hash of all its bytes. It is meant for disks that lose bits, not for people who forge files.

_PIECE = 2**22


def checksums(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the checksums of files by their paths relative to a folder."""
    return {file.relative_to(folder).as_posix(): checksum(file) for file in sorted(files)}


def find_damage(folder: Path, recorded: Mapping[str, str]) -> str | None:
    """Return what is wrong with the first recorded file that is not as it was; else ``None``.

    Files that are not recorded are not looked at.
    """
    for name, wanted in recorded.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        size = f"{file.stat().st_size} bytes"
        if size != wanted.partition(",")[0]:
            return f"{name} has {size}, and was written with {wanted.partition(',')[0]}"
        if checksum(file) != wanted:
            return f"{name} is not as it was written"
    return None


def checksum(file: Path) -> str:
    """Return the size of a file and the hash of its bytes; not computed again while it stays."""
    found = file.stat()
    return f"{found.st_size} bytes, {_digest(file, found.st_size, found.st_mtime_ns, found.st_ino)}"


@lru_cache(maxsize=4096)
def _digest(file: Path, size: int, changed: int, inode: int) -> str:
    digest = xxhash.xxh3_128()
    with errors_naming(file), file.open("rb", buffering=0) as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


# --------------------
# How often the progress of long work is saved.

SHARE_OF_SAVING = 0.1
"""Of the time that work takes: how much may go into saving how far it is."""


class SavingPace:
    """When to save progress: not so often that it would take a large share of the time."""

    def __init__(self) -> None:
        self._cost, self._since = 0.0, time.monotonic()

    def is_due(self) -> bool:
        """Return True if the work since the last saving is long beside what that took."""
        return (time.monotonic() - self._since) * SHARE_OF_SAVING >= self._cost

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long the body takes to save."""
        began = time.monotonic()
        yield
        self._since = time.monotonic()
        self._cost = self._since - began
