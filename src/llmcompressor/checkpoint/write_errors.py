# SPDX-License-Identifier: Apache-2.0
"""Translation of write errors of disks and file systems into clear errors."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmcompressor.errors import OutputError

__all__ = ["check_file", "check_name", "check_named", "creating", "disk_errors", "write_error"]

_CHOOSE = "Choose another output directory."
_FULL = {errno.ENOSPC, errno.EDQUOT}
_IN_TEXT = {
    errno.ENOSPC: ("No space left on device", "os error 28"),
    errno.EFBIG: ("File too large", "os error 27"),
    errno.EROFS: ("Read-only file system", "os error 30"),
}
"""How safetensors reports these, in the text of an error of its own."""
_OF_TORCH = re.compile(
    r"inline_container\.cc.*unexpected pos \d+ vs \d+|PytorchStreamWriter failed"
    r"|^basic_ios::clear: iostream error$"
)
"""How ``torch.save`` reports any of them, and does not say which."""


def check_named(argument: str, given: str | os.PathLike[str]) -> None:
    """Refuse an empty argument, which ``Path`` takes for the current folder, and invalid paths.

    Raises:
        OutputError: the argument is no path.
    """
    if not os.fspath(given):
        raise OutputError(f"The argument {argument!r} is empty.", "Give the path of a folder.")
    try:
        # RuntimeError: a cycle of links, or the home of an unknown user
        os.stat(Path(given).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.ELOOP:
            return  # a missing path can be created; other errors are reported later
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise OutputError(
            f"The argument {argument!r} is {os.fspath(given)[:300]!r}, which is no path: {reason}.",
            "Give the path of a folder.",
        ) from error


def write_error(error: BaseException, target: Path, remedy: str) -> OutputError | None:
    """Return the clear error for an error of writing; ``None`` for any other.

    Args:
        error: the raised error, perhaps while another error was handled.
        target: the output directory.
        remedy: the remedy for a full disk.
    """
    if isinstance(error, OutputError):
        return None
    number = _number(error)
    if number is None:
        return _unsaid(error, target, remedy)
    if number in _FULL:
        return OutputError(
            f"The disk that holds {target.parent} is full; nothing was written to {target}.",
            remedy,
        )
    if number == errno.EFBIG:
        return OutputError(
            f"A file of {target} would be larger than the limit of this process or of the file "
            "system allows; nothing was written there.",
            "Raise the limit (ulimit -f unlimited), or choose an output directory elsewhere.",
        )
    return OutputError(
        f"The file system that holds {target.parent} can only be read; nothing was written.",
        _CHOOSE,
    )


def _unsaid(error: BaseException, target: Path, remedy: str) -> OutputError | None:
    """Return the clear error for a failed write of torch, which does not name its cause."""
    if not isinstance(error, RuntimeError) or not _OF_TORCH.search(str(error)):
        return None
    return OutputError(
        f"A file of {target} could not be written to its end: the disk is full, or a limit of this "
        "process or of the file system is reached.",
        f"{remedy} See ulimit -f, too.",
    )


def _number(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno in {*_FULL, *_IN_TEXT}:
            return error.errno
        for number, texts in _IN_TEXT.items():
            if any(text in str(error) for text in texts):
                return number
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Convert errors of a full disk or a file size limit into a clear error."""
    try:
        yield
    except Exception as error:
        clear = write_error(
            error,
            target,
            "Free some space and repeat the call, which continues, or choose another output "
            "directory.",
        )
        if clear is not None:
            raise clear from error
        raise


@contextmanager
def creating(target: Path) -> Iterator[None]:
    """Convert errors of creating folders and files for ``target`` into an ``OutputError``.

    On an error, folders above ``target`` that did not exist before are removed if they are empty.
    """
    missing = [path for path in target.parents if not os.path.exists(path)]
    try:
        with disk_errors(target):
            yield
    except Exception as error:
        for path in missing:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or str(error)
        raise OutputError(
            f"The output directory {target} cannot be created: {reason}.", _CHOOSE
        ) from error


def check_file(file: Path, what: str) -> None:
    """Refuse a file that could not be written at the end; the trial leaves nothing behind.

    Args:
        file: its folder need not exist.
        what: the file's purpose, for the error.

    Raises:
        OutputError: the file cannot be written.
    """
    existing = next(path for path in (file, *file.absolute().parents) if os.path.exists(path))
    try:
        if existing == file:
            file.open("ab").close()
        else:
            limit = os.pathconf(existing, "PC_NAME_MAX")
            names = file.absolute().relative_to(existing).parts
            if any(len(os.fsencode(name)) > limit for name in names):
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise OutputError(
            f"{what} is {file}, which cannot be written: {existing}: {error.strerror or error}.",
            "Choose another place.",
        ) from error


def check_name(target: Path, existing: Path, longest: int) -> None:
    """Refuse a name that is too long for the file system.

    Args:
        target: the output directory.
        existing: the nearest existing folder above it (or itself).
        longest: bytes that are appended to its name while it is written.

    Raises:
        OutputError: a part of the path is too long.
    """
    limit = os.pathconf(existing, "PC_NAME_MAX")
    parts = target.relative_to(existing).parts
    for index, part in enumerate(parts):
        allowed = limit - (longest if index == len(parts) - 1 else 0)
        if (size := len(os.fsencode(part))) > allowed:
            raise OutputError(
                f"The name {part[:24]}… of an output directory has {size} bytes, and the file "
                f"system and the names of unfinished output leave {allowed}.",
                "Choose a shorter name.",
            )
