# SPDX-License-Identifier: Apache-2.0
"""The working folder of a run: ``NAME.partial`` alongside the output ``NAME``.

::

    NAME.partial/
        lock             held while a run is active; released when its process ends
        journal          the finished blocks
        files/           the output, written in place; renamed to NAME at the end
        scratch/         blocks between two passes over the model
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from llmcompressor.checkpoint.atomic_output import (
    MOVING,
    creation_errors,
    disk_errors,
    publish_folder,
    remove_atomically,
    remove_stale,
    work_folder,
)
from llmcompressor.checkpoint.journal import Journal, RunIdentity
from llmcompressor.errors import InputError, OutputError
from llmcompressor.logger import logger
from llmcompressor.runtime.progress import join_names

__all__ = [
    "Workspace",
    "files_folder",
    "is_being_published",
    "open_workspace",
    "reserve_output",
    "resumable_fingerprint",
    "scratch_folder",
    "was_published",
]

try:
    import fcntl
except ImportError as error:
    raise ImportError(
        "A run locks the folder that it writes to with Python's fcntl, which this system has not: "
        "llmcompressor runs on Linux and macOS."
    ) from error


_JOURNAL, _LOCK, _FILES, _SCRATCH = "journal", "lock", "files", "scratch"


class Workspace:
    """The working folder of one run, locked.

    Attributes:
        target: the output directory.
        folder: the working folder.
        journal: the journal of finished blocks.
    """

    def __init__(self, target: Path, folder: Path, lock: IO[str]) -> None:
        self.target = target
        self.folder = folder
        self._lock = lock
        self.journal = Journal(folder / _JOURNAL)
        self.is_published = was_published(target)

    @property
    def files(self) -> Path:
        """The folder of the output's files: in the working folder, or the target once published."""
        return self.target if self.is_published else files_folder(self.folder)

    @property
    def scratch(self) -> Path:
        """The folder of blocks between two passes over the model."""
        return scratch_folder(self.folder)

    def start_afresh(self, fingerprint: Mapping[str, Any]) -> None:
        """Discard all progress and start a new journal."""
        self.is_published = False
        for folder in (self.files, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
        (self.folder / MOVING).unlink(missing_ok=True)
        self.journal.begin(fingerprint)
        self.files.mkdir()

    def publish(self, *, replace: bool) -> None:
        """Move the finished output to its final name and remove the working folder."""
        publish_folder(self.files, self.target, replace=replace)
        self.is_published = True
        self.remove()

    def remove(self) -> None:
        """Remove the working folder, the journal last, as it identifies the rest.

        A lock without the journal would look like a run that has not begun.
        """
        _remove_all_but(self.folder, _JOURNAL, _LOCK)
        remove_atomically(self.folder, self.target.name)
        remove_stale(self.target)
        self._lock.close()

    def abandon(self) -> None:
        """Discard the progress, as no call could resume from it."""
        if self.journal.is_begun:
            logger.warning(
                f"{self.folder} is removed: the same call would fail again, and no other one could "
                "go on from what is finished."
            )
        self.journal.entries.clear()
        self.journal.progress.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def files_folder(folder: Path) -> Path:
    """Return the folder of the output's files in a working folder."""
    return folder / _FILES


def scratch_folder(folder: Path) -> Path:
    """Return the folder of scratch blocks in a working folder."""
    return folder / _SCRATCH


@contextmanager
def open_workspace(
    target: Path, fingerprint: Mapping[str, Any], *, resume: str = "auto"
) -> Iterator[Workspace]:
    """Open the workspace of a run, new or resumed.

    Args:
        target: the output directory.
        fingerprint: everything that decides the bytes of the output.
        resume: ``"auto"``: resume if there is progress; ``"never"``: discard it; ``"must"``: refuse
            to start without progress.

    Raises:
        OutputError: another run is writing the same output, there is nothing to resume, or the
            progress belongs to another run.
    """
    folder = work_folder(target)
    journal = folder / _JOURNAL
    if resume == "must" and not journal.is_file():
        raise OutputError(
            f"There is nothing to resume: {folder} is not there.",
            'Start with resume="auto" (the default).',
        )
    with disk_errors(target):
        created = not folder.exists()
        missing = [path for path in folder.parents if not path.exists()]
        lock = _create_locked(folder, target)
        if resume == "never":
            journal.unlink(missing_ok=True)
        is_mine = False
        try:
            workspace = Workspace(target, folder, lock)
            _resume_or_start(workspace, fingerprint)
            is_mine = True
            yield workspace
        except BaseException as error:
            lock.close()
            if is_mine and folder.exists() and _has_progress(folder):
                mended = " once that is mended" if isinstance(error, InputError) else ""
                other = ', with resume="auto",' if resume == "never" else ""
                logger.warning(
                    f"What is finished is kept in {folder}: the same call{other} continues{mended}."
                )
            elif created:
                shutil.rmtree(folder, ignore_errors=True)
                for path in missing:
                    if path.is_dir() and not any(path.iterdir()):
                        path.rmdir()
            raise
        lock.close()


@contextmanager
def reserve_output(target: Path, *, resume: str = "auto") -> Iterator[None]:
    """Lock an output directory for a run that keeps no progress.

    Args:
        target: the output directory.
        resume: as for :func:`opened`; ``"never"`` discards the progress of another run.

    Raises:
        OutputError: another run is writing the same output, or has left its progress there.
    """
    folder = work_folder(target)
    missing = [path for path in folder.parents if not path.exists()]
    lock = _create_locked(folder, target)
    try:
        if _has_progress(folder) and resume != "never":
            raise OutputError(
                f"{folder} holds the progress of another run, and this one, with the whole model "
                "in memory, cannot go on with it.",
                "Repeat the call that was broken off, choose another output directory, or pass "
                'resume="never" (--resume never) to throw that progress away.',
            )
        try:
            yield
        finally:
            (folder / _JOURNAL).unlink(missing_ok=True)  # without it the rest is no progress
            _remove_all_but(folder, _LOCK)
            (folder / _LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another run has started, or files are left
                folder.rmdir()
            for path in missing:
                if not any(path.iterdir()):
                    path.rmdir()
    finally:
        lock.close()


def was_published(target: Path) -> bool:
    """Return True if a run was killed after its output was renamed and before its cleanup."""
    folder = work_folder(target.expanduser().resolve())
    has_config = os.path.isfile(target / "config.json")
    return has_config and not (folder / _FILES).exists() and _is_ready(folder)


def is_being_published(target: Path) -> bool:
    """Return True if a killed run was moving its finished files into ``target``.

    They are moved one by one where the folder itself cannot be renamed over the target.
    """
    target = target.expanduser().resolve()
    folder = work_folder(target)
    return was_published(target) or (target in folder.parents and _is_ready(folder))


def resumable_fingerprint(target: Path) -> dict[str, Any] | None:
    """Return the fingerprint of an interrupted run that can be resumed, or ``None``."""
    journal = work_folder(target.expanduser().resolve()) / _JOURNAL
    try:
        found = Journal(journal)
    except OutputError:
        return None  # a damaged journal, which the run itself reports
    return found.fingerprint if found.is_begun or found.is_ready else None


def _remove_all_but(folder: Path, *kept: str) -> None:
    for path in [each for each in folder.iterdir() if each.name not in kept]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_ready(folder: Path) -> bool:
    try:
        return os.path.isfile(folder / _JOURNAL) and Journal(folder / _JOURNAL).is_ready
    except OutputError:
        return False  # a damaged journal, which the run itself reports


def _check_kinds(folder: Path) -> None:
    """Refuse a working folder in which a file has the name of a folder, or the reverse."""
    folders = [folder, folder / _FILES, folder / _SCRATCH]
    for path in (*folders, folder / _JOURNAL, folder / _LOCK):
        if path.exists() and path.is_dir() != (path in folders):
            found, wanted = ("file", "folder") if path in folders else ("folder", "file")
            raise OutputError(
                f"{path} is a {found}, and the {wanted} of that name is part of a run's progress.",
                f"Remove {folder}, or choose another output directory.",
            )


def _has_progress(folder: Path) -> bool:
    journal = folder / _JOURNAL
    return _is_ready(folder) or (journal.is_file() and Journal(journal).is_begun)


def _resume_or_start(workspace: Workspace, fingerprint: Mapping[str, Any]) -> None:
    recorded = workspace.journal.fingerprint
    if recorded is None:
        workspace.start_afresh(fingerprint)
        return
    differing = RunIdentity(fingerprint).differences(recorded)
    if differing:
        raise OutputError(
            f"{workspace.folder} holds the progress of another run: "
            f"{join_names(differing, most=4, separator='; ')}.",
            "Repeat the call that was broken off, with the model and the data that it had, choose "
            'another output directory, or pass resume="never" (--resume never) to throw that '
            "progress away.",
        )
    logger.info(f"Continuing the run in {workspace.folder}.")
    if workspace.target in workspace.folder.parents and workspace.journal.is_ready:
        if workspace.files.exists() and not workspace.is_published:
            publish_folder(workspace.files, workspace.target, replace=False)
        workspace.is_published = True
    workspace.files.mkdir(exist_ok=True)


def _create_locked(folder: Path, target: Path) -> IO[str]:
    """Return the lock of a working folder, which is created if necessary."""
    with creation_errors(target):
        _check_kinds(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return _acquire_lock(folder, target)


def _acquire_lock(folder: Path, target: Path) -> IO[str]:
    """Lock a working folder until the returned file is closed or the process ends."""
    lock = (folder / _LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        raise OutputError(
            f"Another run{f' (process {owner})' if owner else ''} is writing {target}.",
            "Wait for it, or choose another output directory.",
        ) from error
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
