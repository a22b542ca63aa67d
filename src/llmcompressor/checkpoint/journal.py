# SPDX-License-Identifier: Apache-2.0
"""The journal of a run's finished blocks, from which a killed run resumes, and its work folder.

::

    NAME.partial/        alongside the output NAME
        lock             held while a run is active; released when its process ends
        journal          the finished blocks
        files/           the output, written in place; renamed to NAME at the end
        scratch/         blocks between two passes over the model
        moving           names of the output's files, from when they begin to move

One line per finished block is appended to the journal after the block's data is durable, and one
for each saved progress checkpoint of what is learned before the blocks. Each line carries a
checksum: a line torn by a crash or damaged later counts as not written, and its work is redone. The
first line is the run's fingerprint: everything that decides the bytes of the output. A run resumes
only if all of it agrees. Of several processes that share a run the first one makes the folder and
holds its lock, and each appends the lines of its blocks. The work folder goes, in one step, once
the output has its name. A run that is killed between the two finds the list of moved files: the
output is whole, and the same call ends there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import xxhash

from llmcompressor.checkpoint.atomic_output import (
    FILES,
    MOVING,
    OnExisting,
    check_output_dir,
    creation_errors,
    disk_errors,
    is_published,
    parents_removed_on_error,
    publish_folder,
    rejected_folder,
    remove_stale,
    remove_superseded,
    remove_work_folder,
    rounds_folder,
    work_folder,
)
from llmcompressor.errors import GateError, InputError, OutputError
from llmcompressor.logger import log_progress, logger
from llmcompressor.runtime import durable
from llmcompressor.runtime.folder_lock import locked
from llmcompressor.runtime.limits import parse_json
from llmcompressor.runtime.progress import join_names

_RUN, _BLOCK, _CHOICE, _PROGRESS, _READY = "run", "block", "choice", "progress", "ready"
PROCESSOR, PROCESSORS = "processor", "processors"
"""The part of a fingerprint that names the processor, and the choice that lists several."""
_JOURNAL, _LOCK, SCRATCH = "journal", "lock", "scratch"


_ROUND = re.compile(r"\d+(\.partial.*)?")
"""The name of a round's output or work folder."""
_OF_ANOTHER_RUN = (
    "Repeat the call that was broken off, with the model and the data that it had, choose another "
    'output directory, or pass resume="never" (--resume never) to throw that progress away.'
)
_ON_ANOTHER_PROCESSOR = (
    "Sums come out in other digits here. Continue on a machine like the first one and with as many "
    'threads, or pass resume="mixed" (--resume mixed): then the output is of both, which its '
    'report says. resume="never" (--resume never) begins anew.'
)


@dataclass(frozen=True)
class BlockEntry:
    """The journal entry of a finished block; ``""`` is everything outside the blocks.

    ``digest`` and ``source`` are hashes of its tensors as they were written and read, ``files`` the
    stamps of the files that they were read from, ``report`` the modifiers' records of its modules,
    and ``stage`` is the pass that wrote it; the last pass writes the output. ``written`` and
    ``read`` have the hash of each tensor of the output and of the source, for the manifest.
    """

    block: str
    digest: str
    source: str
    report: Mapping[str, Any] = field(default_factory=dict)
    stage: int = 0
    files: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgressEntry:
    """The journal entry of a progress checkpoint, for work in a pass that is not a block.

    ``number`` counts earlier checkpoints of that name, ``digest`` is the hash of its tensors.
    """

    stage: int
    name: str
    number: int
    digest: str
    figures: Mapping[str, Any] = field(default_factory=dict)


class RunIdentity(dict[str, Any]):
    """Everything that decides the result of a run, by name: hashes, and settings as JSON values.

    A run goes on from progress, and a stage or a training counts as the same, only if all of it
    agrees.

    >>> RunIdentity(recipe="a", data={"rows": 3}).differences({"recipe": "a", "data": {"rows": 4}})
    ['data.rows: 4 then, 3 now']
    """

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """Return one line for each item in which a recorded identity differs."""
        now, then = dict(_flatten(self)), dict(_flatten(recorded))
        found = []
        for name in {**then, **now}:
            old, new = then.get(name), now.get(name)
            if old == new:
                continue
            if isinstance(old, str) and isinstance(new, str):  # the first line that differs
                lines = zip_longest(old.splitlines(), new.splitlines(), fillvalue="")
                own = ((one.strip(), two.strip()) for one, two in lines if one != two)
                old, new = next(own, (old, new))
            found.append(f"{name}: {_shorten(old)} then, {_shorten(new)} now")
        return found


class Journal:
    """The journal of one run; its file need not exist."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._clear(None)
        if file.is_file():
            self._read()

    def _clear(self, fingerprint: Mapping[str, Any] | None) -> None:
        self.fingerprint = None if fingerprint is None else dict(fingerprint)
        self.entries: dict[tuple[int, str], BlockEntry] = {}
        self.choices: dict[str, Any] = {}
        self.progress: dict[tuple[int, str], ProgressEntry] = {}
        self.is_ready = False

    @property
    def has_progress(self) -> bool:
        """True if the journal holds work from which a later call can resume."""
        return bool(self.entries or self.progress or self.is_ready)

    def begin(self, fingerprint: Mapping[str, Any]) -> None:
        """Start a new journal with a fingerprint, in place of any earlier one."""
        self._clear(fingerprint)
        self._replace()

    def add(self, entry: BlockEntry | ProgressEntry) -> None:
        """Append a finished block or a progress checkpoint, whose data must be durable."""
        self._append(_BLOCK if isinstance(entry, BlockEntry) else _PROGRESS, vars(entry))

    def note(self, entry: BlockEntry) -> None:
        """Take note of a block that another process of the run has finished and recorded."""
        self.entries[entry.stage, entry.block] = entry

    def decide(self, name: str, value: Any) -> Any:
        """Return the recorded value of a machine-dependent choice, or record ``value``."""
        if name not in self.choices:
            self._append(_CHOICE, {"name": name, "value": value})
        return self.choices[name]

    @property
    def processors(self) -> list[Any]:
        """The processors that had a part in the run, if they are several."""
        return list(self.choices.get(PROCESSORS, ()))

    def add_processor(self, processor: Any) -> None:
        """Record that the run goes on with another processor than it began with."""
        known = self.processors or [(self.fingerprint or {}).get(PROCESSOR)]
        if processor not in known:
            self._append(_CHOICE, {"name": PROCESSORS, "value": [*known, processor]})

    def mark_ready(self) -> None:
        """Record that the output is complete but for its name."""
        self._append(_READY, {})

    def _append(self, kind: str, content: Mapping[str, Any]) -> None:
        durable.append(self._file, _line(kind, content))
        self._take(kind, content)

    def _read(self) -> None:
        lines = self._file.read_bytes().split(b"\n")
        damaged = 0
        for line in filter(None, lines):
            checksum, _, text = line.decode("utf-8", errors="replace").partition(" ")
            is_whole = checksum == xxhash.xxh3_64_hexdigest(text.encode())
            damaged += not (is_whole and self._take(*parse_json(text)))
        if damaged:
            logger.warning(f"{damaged} damaged line(s) of {self._file}: what they say is redone.")
        if self.fingerprint is None:
            raise OutputError(
                f"The journal {self._file} is damaged: it does not say what run it is of.",
                'Start afresh with resume="never" (--resume never), or restore the file.',
            )
        if damaged or lines[-1]:  # so that lines can be appended
            self._replace()

    def _take(self, kind: str, content: Mapping[str, Any]) -> bool:
        if kind == _RUN:
            self.fingerprint = dict(content)
        elif kind == _BLOCK:
            entry = BlockEntry(**content)
            self.entries[entry.stage, entry.block] = entry
        elif kind == _CHOICE:
            self.choices[content["name"]] = content["value"]
        elif kind == _PROGRESS:
            made = ProgressEntry(**content)
            self.progress[made.stage, made.name] = made
        elif kind == _READY:
            self.is_ready = True
        else:
            return False
        return True

    def _replace(self) -> None:
        assert self.fingerprint is not None
        lines = [_line(_RUN, self.fingerprint)]
        lines += [
            _line(_CHOICE, {"name": name, "value": value}) for name, value in self.choices.items()
        ]
        lines += [_line(_PROGRESS, vars(entry)) for entry in self.progress.values()]
        lines += [_line(_BLOCK, vars(entry)) for entry in self.entries.values()]
        lines += [_line(_READY, {})] if self.is_ready else []
        durable.replace(self._file, b"".join(lines))


def _line(kind: str, content: Mapping[str, Any]) -> bytes:
    text = json.dumps([kind, content], separators=(",", ":"), ensure_ascii=False)
    return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n".encode()


def _flatten(items: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in items.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shorten(value: Any) -> str:
    text = "nothing" if value in (None, "") else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Workspace:
    """The work folder of one run for the output directory ``target``, locked.

    Attributes:
        is_published: the output, whole, has its name already.
        files: the folder of the output's files, which is ``target`` then.
    """

    def __init__(self, target: Path, folder: Path) -> None:
        self.target = target
        self.folder = folder
        self.scratch = folder / SCRATCH
        self.journal = Journal(folder / _JOURNAL)
        self.is_published = is_published(target)

    @property
    def files(self) -> Path:
        """The folder of the output's files."""
        return self.target if self.is_published else self.folder / FILES

    def start_or_resume(
        self, fingerprint: Mapping[str, Any], *, resume: str = "auto", overwrite: bool = False
    ) -> None:
        """Begin a new journal, or continue that of the same run (OutputError: of another)."""
        recorded = self.journal.fingerprint
        differing = RunIdentity(fingerprint).differences(recorded or {})
        only_processor = all(line.startswith(f"{PROCESSOR}.") for line in differing)
        if differing and recorded is not None and only_processor and resume == "mixed":
            logger.warning(
                f"The run goes on with another processor, {join_names(differing, separator='; ')}. "
                "Its output is of both, and the report says so."
            )
            self.journal.add_processor(fingerprint[PROCESSOR])
            differing = []
        is_gone = self.journal.is_ready and not self.files.exists()
        if recorded is None or is_gone or (differing and self.is_published):
            self._begin(fingerprint, overwrite=overwrite)
        elif differing:
            raise OutputError(
                f"{self.folder} holds the progress of another run: "
                f"{join_names(differing, most=4, separator='; ')}.",
                _ON_ANOTHER_PROCESSOR if only_processor else _OF_ANOTHER_RUN,
            )
        else:
            log_progress(f"Continuing the run in {self.folder}.")
            if (self.folder / MOVING).exists() and not self.is_published:
                self._move(replace=overwrite)
        if not self.is_published:
            durable.make_folder(self.files)

    def _begin(self, fingerprint: Mapping[str, Any], *, overwrite: bool) -> None:
        if self.is_published:
            self.is_published = False
            _forget_published(self.folder, self.target, overwrite=overwrite)
        (self.folder / MOVING).unlink(missing_ok=True)
        for folder in (self.files, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
        self.journal.begin(fingerprint)

    def mark_ready(self) -> None:
        """Record that the output is complete but for its name; all of it is on the disk."""
        durable.sync_tree(self.files)
        self.journal.mark_ready()

    def publish(self, *, replace: bool, gate: Callable[[Path], None] | None = None) -> None:
        """Move the finished output to its final name and remove the work folder.

        Args:
            replace: replace an existing checkpoint of that name.
            gate: called with the output before; one that has its name already has passed.

        Raises:
            GateError: raised by ``gate``; the output is in ``NAME.rejected``.
        """
        if not self.is_published:
            if gate is not None:
                self._pass_gate(gate)
            self._move(replace=replace)
        if gate is not None:
            remove_superseded(self.target)
        self._clean_up()
        remove_stale(self.target)

    def _clean_up(self) -> None:
        """Remove the work folder, and before it the rounds that its output was chosen of."""
        remove_rounds(self.target)
        remove_work_folder(self.target)

    def _pass_gate(self, gate: Callable[[Path], None]) -> None:
        try:
            gate(self.files)
        except GateError:
            publish_folder(self.files, rejected_folder(self.target), OnExisting.REPLACE)
            self._clean_up()
            raise

    def _move(self, *, replace: bool) -> None:
        on_existing = OnExisting.REPLACE if replace else OnExisting.REFUSE
        publish_folder(self.files, self.target, on_existing, marker=self.folder / MOVING)
        self.is_published = True

    def abandon(self) -> None:
        """Discard the progress, as no call could resume from it."""
        if self.journal.has_progress:
            logger.warning(
                f"{self.folder} is removed: the same call would fail again, and no other one could "
                "go on from what is finished."
            )
        remove_work_folder(self.target)


@contextmanager
def open_workspace(
    target: Path, fingerprint: Mapping[str, Any], *, resume: str = "auto", overwrite: bool = False
) -> Iterator[Workspace]:
    """Open the workspace of a run; its fingerprint decides the bytes of the output.

    ``resume`` is ``"auto"``: resume if there is progress; ``"never"``: discard it; ``"must"``:
    refuse to start without progress; or ``"mixed"``: resume also what another processor has begun,
    which computes other digits. ``overwrite`` lets the output replace a checkpoint.

    Raises:
        OutputError: another run is writing the same output, there is nothing to resume, or the
            progress belongs to another run.
    """
    folder = work_folder(target)
    if resume == "must" and not (folder / _JOURNAL).is_file():
        raise OutputError(
            f"There is nothing to resume: {folder} is not there.",
            'Start with resume="auto" (the default).',
        )
    created, is_mine = not folder.exists(), False
    with disk_errors(target), _locked(folder, target):
        if resume == "never":
            (folder / _JOURNAL).unlink(missing_ok=True)
        try:
            workspace = Workspace(target, folder)
            workspace.start_or_resume(fingerprint, resume=resume, overwrite=overwrite)
            is_mine = True
            yield workspace
        except BaseException as error:
            if is_mine and Journal(folder / _JOURNAL).has_progress:
                mended = " once that is mended" if isinstance(error, InputError) else ""
                other = ', with resume="auto",' if resume == "never" else ""
                logger.warning(
                    f"What is finished is kept in {folder}: the same call{other} continues{mended}."
                )
            elif created:
                remove_work_folder(target)
            raise


@contextmanager
def reserve_output(
    target: Path, *, resume: str = "auto", overwrite: bool = False
) -> Iterator[None]:
    """Lock an output directory for a run without progress; ``"never"`` discards that of others.

    Raises:
        OutputError: another run is writing the same output, or has left its progress there.
    """
    folder = work_folder(target)
    with parents_removed_on_error(target), _locked(folder, target):
        is_whole = is_published(target)
        if not is_whole and Journal(folder / _JOURNAL).has_progress and resume != "never":
            raise OutputError(
                f"{folder} holds the progress of another run, and this one, which keeps none "
                "there, cannot go on with it.",
                "Repeat the call that was broken off, choose another output directory, or pass "
                'resume="never" (--resume never) to throw that progress away.',
            )
        try:
            if is_whole:
                _forget_published(folder, target, overwrite=overwrite)
            yield
        finally:
            remove_work_folder(target)


def rounds_of(target: Path) -> Journal:
    """Return the journal of the rounds of a search, in ``NAME.rounds``, which need not exist.

    Raises:
        OutputError: that folder holds something else.
    """
    folder = rounds_folder(target)
    file = folder / _JOURNAL
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    is_ours = file.is_file() or all(map(_ROUND.fullmatch, names))
    if folder.exists() and not (folder.is_dir() and is_ours):
        raise OutputError(
            f"{folder} is where the rounds of a search go, and it holds something else.",
            "Move it elsewhere, or choose another output directory.",
        )
    return Journal(file)


def remove_rounds(target: Path) -> None:
    """Remove the rounds of a search; another folder of that name stays."""
    folder = rounds_folder(target)
    if (folder / _JOURNAL).is_file():
        durable.remove(folder)


def adopt_output(held: Path, target: Path) -> None:
    """Give a whole output that has no name, of another target, to a run on ``target`` to go on.

    Args:
        held: the target that it was made for; nothing is done if it has no whole output.
        target: that of the run, which has no progress.
    """
    folder = work_folder(held)
    if Journal(folder / _JOURNAL).is_ready:
        durable.rename(folder, work_folder(target))


def _forget_published(folder: Path, target: Path, *, overwrite: bool) -> None:
    """Take the output of an ended run for what it is for every other one: a folder in use."""
    if not overwrite:
        remove_work_folder(target)
        raise OutputError(
            f"The output directory {target} already holds files: those of a run that was killed "
            "when all of them had their names.",
            "The checkpoint there is complete: use it, choose another directory, or pass "
            "overwrite=True (--overwrite) to replace it.",
        )
    (folder / _JOURNAL).unlink(missing_ok=True)  # first: the list alone still says that it is whole
    (folder / MOVING).unlink()
    check_output_dir(target, overwrite=overwrite)


def remove_remains(target: Path) -> None:
    """Remove what a killed run has left beside its whole output; another run's progress stays."""
    target = target.expanduser().resolve()
    folder = work_folder(target)
    if folder.is_dir():
        with _locked(folder, target):
            if is_published(target) or not Journal(folder / _JOURNAL).has_progress:
                remove_work_folder(target)
    remove_stale(target)


def resumable_fingerprint(target: Path, *, has_progress: bool = True) -> dict[str, Any] | None:
    """Return the fingerprint of an interrupted run that can be resumed, or ``None``.

    Args:
        target: the output directory.
        has_progress: a run that has finished nothing does not count.
    """
    found = _journal_of(target)
    if found is None or (has_progress and not found.has_progress):
        return None
    return found.fingerprint


def resumable_run(target: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fingerprint and the choices of an interrupted run, also if it finished nothing.

    Args:
        target: the output directory.
    """
    found = _journal_of(target)
    return ({}, {}) if found is None else (found.fingerprint or {}, found.choices)


def _journal_of(target: Path) -> Journal | None:
    """Return the journal of an output's work folder; ``None`` if it is damaged: the run tells."""
    try:
        return Journal(work_folder(target.expanduser().resolve()) / _JOURNAL)
    except OutputError:
        return None


@contextmanager
def _locked(folder: Path, target: Path) -> Iterator[None]:
    """Create a work folder and lock it until the block or the process ends."""
    with ExitStack() as stack:
        with creation_errors(target):
            _check_kinds(folder)
            durable.make_folder(folder)
            stack.enter_context(locked(folder / _LOCK, str(target)))
        yield


def _check_kinds(folder: Path) -> None:
    """Refuse a work folder in which something is of another kind than a run would make it."""
    folders = [folder, folder / FILES, folder / SCRATCH]
    files = [folder / _JOURNAL, folder / _LOCK, folder / MOVING]
    remedy = f"Remove {folder}, or choose another output directory."
    for path in (*folders, *files):
        if path.exists() and path.is_dir() != (path in folders):
            found, wanted = ("file", "folder") if path in folders else ("folder", "file")
            raise OutputError(
                f"{path} is a {found}, and the {wanted} of that name is part of a run's progress.",
                remedy,
            )
    for path in (*files, *(each for one in folders[1:] for each in one.rglob("*"))):
        if path.is_symlink():
            raise OutputError(
                f"{path} is a link, and a run would write to the file that it leads to.", remedy
            )
