# SPDX-License-Identifier: Apache-2.0
"""A record of system calls, and the folders that a loss of power may leave after each."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

State = dict[str, bytes]
"""Path below the root → content."""
_CHANGES = ("open", "write", "pwrite", "fsync", "fdatasync", "rename", "replace", "unlink", "mkdir")


class _Disk:
    """What is on the disk for sure: contents when they were synced, names when their folder was."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.kinds: dict[int, bool] = {}
        self.last: list[tuple[int, str, int | None]] = []
        for path in (root, *root.rglob("*")):
            self.sync(path)

    def sync(self, path: Path) -> None:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            self.names[found.st_ino] = _entries(path, self.kinds)
        else:
            self.contents[found.st_ino] = path.read_bytes()

    def forget(self, path: Path) -> None:
        """The number of a file that is removed, or was created, belongs to another one."""
        if path.exists():
            self.contents.pop(path.stat().st_ino, None)
            self.names.pop(path.stat().st_ino, None)

    def note(self, call: str, *given: str | os.PathLike[str], is_new: bool) -> None:
        """Names that have just changed may come to the disk before all others."""
        if call == "open" and not is_new:
            return
        paths = [Path(os.fsdecode(one)) for one in given]
        if is_new:
            self.forget(paths[0])
        now = [(path.parent.stat().st_ino, path) for path in paths]
        self.last = [(up, one.name, one.stat().st_ino if one.exists() else None) for up, one in now]
        self.kinds.update({path.stat().st_ino: path.is_dir() for path in paths if path.exists()})

    def states(self) -> Iterator[State]:
        """Names that were synced, with the last change or all of them; contents as synced."""
        root, synced = self.root.stat().st_ino, self.names
        yield dict(self._walk(root, ""))
        self.names = {folder: dict(names) for folder, names in synced.items()}
        for folder, name, number in self.last:
            if number is None:
                self.names.get(folder, {}).pop(name, None)
            else:
                self.names.setdefault(folder, {})[name] = number
        yield dict(self._walk(root, ""))
        self.names = synced
        yield {
            str(path.relative_to(self.root)): self.contents.get(path.stat().st_ino, b"")
            for path in self.root.rglob("*")
            if path.is_file()
        }

    def _walk(self, folder: int, prefix: str) -> Iterator[tuple[str, bytes]]:
        for name, number in self.names.get(folder, {}).items():
            if self.kinds.get(number):
                yield from self._walk(number, f"{prefix}{name}/")
            else:
                yield f"{prefix}{name}", self.contents.get(number, b"")


def _entries(folder: Path, kinds: dict[int, bool]) -> dict[str, int]:
    found = {entry.name: entry for entry in os.scandir(folder)}
    kinds.update({entry.inode(): entry.is_dir() for entry in found.values()})
    return {name: entry.inode() for name, entry in found.items()}


@contextmanager
def power_cuts(root: Path, check: Callable[[State], None]) -> Iterator[list[str]]:
    """Call ``check`` with each state in which a cut may leave ``root``, after each system call.

    Yields the names of the calls.
    """
    disk, calls = _Disk(root), list[str]()
    real = {name: getattr(os, name) for name in _CHANGES}

    def recorded(name: str) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            path = Path(os.fsdecode(first)) if isinstance(first, str | os.PathLike) else None
            is_new = path is not None and not path.exists()
            if name == "unlink" and path is not None:
                disk.forget(path)
            result = real[name](first, *rest, **options)
            if name in ("fsync", "fdatasync"):
                disk.sync(Path(os.readlink(f"/proc/self/fd/{first}")))
            if path is not None:
                disk.note(name, path, *(rest if "re" in name else ()), is_new=is_new)
            calls.append(name)
            with pytest.MonkeyPatch.context() as undone:
                for each, own in real.items():
                    undone.setattr(os, each, own)
                for state in disk.states():
                    check(state)
            return result

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in _CHANGES:
            patched.setattr(os, name, recorded(name))
        yield calls


def write_state(folder: Path, state: State) -> Path:
    """Write the files of a state to a new folder."""
    for name, content in state.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder
