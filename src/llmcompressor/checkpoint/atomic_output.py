# SPDX-License-Identifier: Apache-2.0
"""Atomic output: a directory that appears under its name only when it is complete.

Files are written into a sibling (``NAME.partial-…``, hence the same file system), flushed to the
disk and renamed into place in one step. A run that fails, is interrupted or is killed leaves the
target unchanged.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from llmcompressor.errors import OutputError
from llmcompressor.logger import logger

__all__ = [
    "MOVING",
    "OnExisting",
    "check_file",
    "check_name",
    "check_output_dir",
    "check_path_argument",
    "creation_errors",
    "disk_errors",
    "fsync",
    "fsync_tree",
    "publish_folder",
    "remove_atomically",
    "remove_stale",
    "staged_output",
    "work_folder",
    "write_error",
]


# --------------------
# Translation of write errors of disks and file systems into clear errors.

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


def check_path_argument(argument: str, given: str | os.PathLike[str]) -> None:
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
    number = _write_errno(error)
    if number is None:
        if not isinstance(error, RuntimeError) or not _OF_TORCH.search(str(error)):
            return None
        return OutputError(  # torch does not name the cause
            f"A file of {target} could not be written to its end: the disk is full, or a limit of "
            "this process or of the file system is reached.",
            f"{remedy} See ulimit -f, too.",
        )
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


def _write_errno(error: BaseException | None) -> int | None:
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
def creation_errors(target: Path) -> Iterator[None]:
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


# --------------------
# Atomic output: a directory that appears under its name only when it is complete.

MOVING = "moving"
"""In a working folder, once files of the output have begun to be moved out of it."""

_WEIGHT_FILE = re.compile(r"(model|pytorch_model).*\.(safetensors|bin|index\.json)")
_WHOLE_FOLDERS = {"additional_chat_templates"}
"""Of which nothing may stay that an earlier checkpoint had: all that is in them is read."""
_counter = itertools.count()


class OnExisting(Enum):
    """Policy for a target that already holds files."""

    REFUSE = "refuse"
    SPARE = "spare"
    REPLACE = "replace"
    MERGE = "merge"


def check_output_dir(
    output_dir: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    is_ours: bool = False,
) -> Path:
    """Refuse an output directory that could not be written at the end; changes nothing.

    Args:
        output_dir: the checkpoint's directory.
        source: the local directory the model was loaded from, if there is one.
        overwrite: allow to replace an existing checkpoint.
        is_ours: the existing files were written by a run that is to be resumed.

    Returns:
        The absolute path of the output directory.

    Raises:
        OutputError: it has no name, is a file, is in use, overlaps the input, contains the
            current directory, or cannot be created.
    """
    check_path_argument("output_dir", output_dir)
    target = _absolute_path(output_dir)
    # Path.exists raises an error for a name that is too long
    existing = next((path for path in target.parents if os.path.isdir(path)), target)  # the root
    check_name(target, existing, len(f".partial-{_owner()}-999"))
    if target.exists() and not target.is_dir():
        raise OutputError(f"The output {target} is a file, not a directory.", _CHOOSE)
    if source is not None:
        _check_no_overlap(target, _absolute_path(source))
    _check_not_current_directory(target)
    if _is_in_use(target) and not is_ours:
        _check_replaceable(target, overwrite=overwrite)
    _check_writable(target)
    return target


@contextmanager
def staged_output(
    output_dir: str | os.PathLike[str], *, on_existing: OnExisting = OnExisting.REFUSE
) -> Iterator[Path]:
    """Write a directory elsewhere and move it into place when the block ends without an error.

    Args:
        output_dir: the final directory.
        on_existing: refuse a target that holds files; leave it and use a name alongside it;
            replace it at the end; or move the new files into it (a ``config.json`` disappears
            first and is moved last, so a loader never sees the old configuration with new
            weights).

    Yields:
        The directory to write into.

    Raises:
        OutputError: the target holds files and they may not be touched, or the disk is full.
    """
    target = _absolute_path(output_dir)
    if on_existing is OnExisting.REFUSE and _is_in_use(target):
        _check_replaceable(target, overwrite=False)
    created = _make_parents(target.parent)
    inside = _must_stage_inside(target)
    folder = target if inside else target.parent
    remove_stale(target, folder)
    staging = folder / f"{target.name}.partial-{_owner()}-{next(_counter)}"
    try:
        with creation_errors(target):
            staging.mkdir()
        yield staging
        fsync_tree(staging)
        if inside or (on_existing is OnExisting.MERGE and target.exists()):
            spares = on_existing in (OnExisting.REFUSE, OnExisting.SPARE)
            if spares and _is_in_use(target, staging):
                raise _taken_error(target)
            _move_into(staging, target, purge=on_existing is OnExisting.REPLACE)
        else:
            _rename_over(staging, target, replace=on_existing is OnExisting.REPLACE)
    except _TakenError as error:
        spare = _free_name(folder / f"{target.name}.finished")
        staging.rename(spare)
        raise OutputError(
            f"{error.problem} What was made stands in {spare}.",
            "Give it another name yourself, or move the other files away.",
        ) from error
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in reversed(created):
            with suppress(OSError):  # it is in use
                parent.rmdir()
        clear = write_error(error, target, "Free some space or choose another output directory.")
        if clear is not None:
            raise clear from error
        raise


def work_folder(target: Path) -> Path:
    """Return the work folder of a resumable run on ``target``: ``NAME.partial`` alongside it."""
    name = f"{target.name}.partial"
    return target / name if _must_stage_inside(target) else target.with_name(name)


def publish_folder(folder: Path, target: Path, *, replace: bool) -> None:
    """Move a finished folder to its final name.

    Args:
        folder: a folder in the :func:`work_folder` of ``target``.
        target: the final path.
        replace: replace an existing checkpoint there.

    Raises:
        OutputError: files appeared there since the run began, and may not be replaced.
    """
    fsync_tree(folder)
    if target in folder.parents:
        work = work_folder(target)
        begun = work / MOVING
        if not replace and not begun.exists() and _is_in_use(target):
            raise _taken_error(target)
        begun.touch()  # from here on the target holds files of its own
        fsync(work)
        for path in sorted(target.iterdir(), key=lambda path: path.name != "config.json"):
            if replace and path != work:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(target / path.name)
        folder.rmdir()
        fsync(target)
    else:
        _rename_over(folder, target, replace=replace)
        remove_stale(target)


def remove_stale(target: Path, folder: Path | None = None) -> None:
    """Delete what a killed run of this machine left alongside ``target``, or in ``folder``."""
    for path in _stale_paths(folder or target.parent, target.name):
        logger.info(f"Removing {path}, left by a run that was killed.")
        shutil.rmtree(path, ignore_errors=True)


def remove_atomically(folder: Path, name: str) -> None:
    """Atomically remove a small folder that belongs to the target ``name``.

    It is renamed first to a name that the next run removes, should this run be killed meanwhile.
    """
    aside = _backup_path(folder.with_name(name))
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _absolute_path(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().resolve()


def _check_no_overlap(target: Path, source: Path) -> None:
    if target == source:
        raise OutputError(f"The output directory {target} is the input model itself.", _CHOOSE)
    if target in source.parents:
        raise OutputError(
            f"The output directory {target} contains the input model {source}.", _CHOOSE
        )
    if source in target.parents and source.is_dir():
        raise OutputError(
            f"The output directory {target} lies inside the input model {source}.", _CHOOSE
        )


def _check_not_current_directory(target: Path) -> None:
    """Refuse the current directory: it would be replaced, and its users would not see it."""
    if target in _current_directories():
        raise OutputError(
            f"The output directory {target} is the current directory, or contains it, and would "
            "be replaced as a whole.",
            f"Name a folder inside it ({target / 'compressed'}), or one elsewhere.",
        )


def _current_directories() -> tuple[Path, ...]:
    """Return the current directory and its parents; empty if it was removed."""
    try:
        current = Path.cwd()
    except FileNotFoundError:
        return ()
    return (current, *current.parents)


def _is_in_use(target: Path, *own: Path) -> bool:
    """Return True if ``target`` holds files, except those of the run that writes to it."""
    mine = {work_folder(target), *own}
    return target.is_dir() and any(path not in mine for path in target.iterdir())


def _check_replaceable(target: Path, *, overwrite: bool) -> None:
    if not overwrite:
        stale = ", ".join(map(str, _stale_paths(target.parent, target.name)))
        raise OutputError(
            f"The output directory {target} already holds files."
            + (f" Beside it a run that was killed has left {stale}." if stale else ""),
            "Choose another one, or pass overwrite=True (--overwrite) to replace it.",
        )
    looks_like_checkpoint = (target / "config.json").is_file() or any(target.glob("*.safetensors"))
    holds_people = (target / ".git").exists() or target in _current_directories()
    if holds_people or target == Path.home() or not looks_like_checkpoint:
        raise OutputError(
            f"The output directory {target} holds files but no checkpoint, so it is not replaced.",
            "Choose another one, or remove it yourself.",
        )


def _check_writable(target: Path) -> None:
    existing = next(path for path in (target, *target.parents) if path.exists())
    if not existing.is_dir():
        raise OutputError(
            f"The output directory {target} cannot be created: {existing} is a file.", _CHOOSE
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(
            f"The output directory {target} cannot be written: no permission in {existing}.",
            _CHOOSE,
        )


def _make_parents(parent: Path) -> list[Path]:
    """Create missing parents and return them, outermost first."""
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"The directory {parent} cannot be created: {error}.", _CHOOSE) from error
    return missing[::-1]


def _must_stage_inside(target: Path) -> bool:
    """Return True for a target that cannot be renamed over: a mount, or a read-only parent."""
    if not os.path.isdir(target):  # Path.is_dir fails on a name that is too long
        return False
    return os.path.ismount(target) or not os.access(target.parent, os.W_OK)


def _owner() -> str:
    host = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())
    return f"{host}-{os.getpid()}"


def _backup_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.old-{_owner()}-{next(_counter)}")


def _stale_paths(folder: Path, name: str) -> list[Path]:
    """Return what a killed run of this machine left in ``folder`` and is no longer needed."""
    host = _owner().rpartition("-")[0]
    pattern = re.compile(rf"{re.escape(name)}\.(?:partial|old)-{host}-(\d+)-\d+")
    has_target = (folder / name).exists()
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = pattern.fullmatch(path.name)
        # a target that was moved aside is the only copy until there is a new one
        is_spare = has_target or ".partial-" in path.name
        if match and is_spare and not _is_alive(int(match.group(1))):
            found.append(path)
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def fsync_tree(folder: Path) -> None:
    """Sync every file and directory below ``folder`` to the disk."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def fsync(path: Path) -> None:
    """Sync a file, or a folder and so its file names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _TakenError(OutputError):
    """Files have appeared in the output's place since the run began."""


def _taken_error(target: Path) -> _TakenError:
    return _TakenError(
        f"The output directory {target} holds files that were not there when the run began.",
        "Move them elsewhere and repeat the call: where it keeps its progress, nothing is done "
        "again. Or pass overwrite=True (--overwrite) to replace them.",
    )


def _free_name(path: Path) -> Path:
    """Return ``path``, or the first free numbered variant of it."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(one for one in itertools.chain([path], numbered) if not one.exists())


def _rename_over(staging: Path, target: Path, *, replace: bool) -> None:
    """Rename ``staging`` to ``target``; an old target is removed only after that."""
    aside = _backup_path(target)
    has_old = target.is_dir() and any(target.iterdir())
    if has_old and not replace:
        raise _taken_error(target)
    try:
        if has_old:
            target.rename(aside)
        staging.rename(target)
    except BaseException:
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise
    fsync(target.parent)
    if has_old:
        shutil.rmtree(aside, ignore_errors=True)


def _move_into(staging: Path, target: Path, *, purge: bool) -> None:
    new = {path.name for path in staging.iterdir()}
    own = (staging, work_folder(target))
    for path in sorted(target.iterdir(), key=lambda path: path.name != "config.json"):
        stale = purge or path.name == "config.json" or _WEIGHT_FILE.fullmatch(path.name)
        if path in own or not (stale or path.name in new & _WHOLE_FOLDERS):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in sorted(staging.iterdir(), key=lambda path: path.name == "config.json"):
        _move(path, target / path.name)
    staging.rmdir()
    fsync(target)


def _move(path: Path, place: Path) -> None:
    """Move a file or merge a folder into its place, keeping other files there."""
    if not (path.is_dir() and place.is_dir()):
        path.replace(place)
        return
    for inner in sorted(path.iterdir()):
        _move(inner, place / inner.name)
    path.rmdir()
    fsync(place)
