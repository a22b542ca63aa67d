# SPDX-License-Identifier: Apache-2.0
"""Journal of a run's finished blocks on disk, from which a killed run resumes.

One line per finished block is appended after the block's data is durable, and one for each saved
progress checkpoint of what is learned before the blocks. Each line carries a checksum: a line torn
by a crash or damaged later counts as not written, and its work is redone. The first line is the
run's fingerprint: everything that decides the bytes of the output. A run resumes only if all of it
agrees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import xxhash

from llmcompressor.checkpoint.atomic_output import fsync
from llmcompressor.errors import OutputError
from llmcompressor.logger import logger

__all__ = ["BlockEntry", "Journal", "ProgressEntry", "RunIdentity"]

_RUN, _BLOCK, _CHOICE, _READY = "run", "block", "choice", "ready"
_PROGRESS = "progress"


@dataclass(frozen=True)
class BlockEntry:
    """The journal entry of a finished block.

    Attributes:
        block: its name; empty for everything outside the blocks.
        digest: hash of its tensors as they were written.
        source: hash of its tensors as they were read.
        report: the modifiers' records of its modules, by modifier.
        stage: the pass that wrote it; the last pass writes the output.
        files: file that its tensors were read from → the file's stamp then.
    """

    block: str
    digest: str
    source: str
    report: Mapping[str, Any] = field(default_factory=dict)
    stage: int = 0
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgressEntry:
    """The journal entry of a progress checkpoint, for work that is not a block.

    Attributes:
        stage: the pass over the model.
        name: the name of the work in progress.
        number: number of earlier checkpoints of that name.
        digest: hash of its tensors as they were written.
        figures: further values to keep.
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
            if now.get(name) != then.get(name):
                old, new = _first_difference(then.get(name), now.get(name))
                found.append(f"{name}: {_shorten(old)} then, {_shorten(new)} now")
        return found


class Journal:
    """The journal of one run.

    Args:
        file: the journal's path; the file need not exist.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.fingerprint: dict[str, Any] | None = None
        self.entries: dict[tuple[int, str], BlockEntry] = {}
        self.choices: dict[str, Any] = {}
        self.progress: dict[tuple[int, str], ProgressEntry] = {}
        self.is_ready = False
        self._read()

    @property
    def is_begun(self) -> bool:
        """True if the journal holds work from which a later call can resume."""
        return bool(self.entries or self.progress)

    def begin(self, fingerprint: Mapping[str, Any]) -> None:
        """Start a new journal with a fingerprint, in place of any earlier one."""
        self.entries.clear()
        self.choices.clear()
        self.progress.clear()
        self.is_ready = False
        self.fingerprint = dict(fingerprint)
        self._replace([_line(_RUN, self.fingerprint)])

    def _replace(self, lines: Sequence[bytes]) -> None:
        """Replace all lines atomically."""
        replacement = self._file.with_suffix(".new")
        replacement.write_bytes(b"".join(lines))
        fsync(replacement)
        replacement.replace(self._file)
        fsync(self._file.parent)

    def add(self, entry: BlockEntry) -> None:
        """Append a finished block, whose data must be durable."""
        self._append(_BLOCK, vars(entry))
        self.entries[entry.stage, entry.block] = entry

    def advance(self, entry: ProgressEntry) -> None:
        """Append a progress checkpoint, whose data must be durable."""
        self._append(_PROGRESS, vars(entry))
        self.progress[entry.stage, entry.name] = entry

    def decide(self, name: str, value: Any) -> Any:
        """Return the recorded value of a choice that depends on the machine, or record ``value``.

        Args:
            name: the name of the choice.
            value: the value to record if there is none yet.
        """
        if name not in self.choices:
            self._append(_CHOICE, {"name": name, "value": value})
            self.choices[name] = value
        return self.choices[name]

    def mark_ready(self) -> None:
        """Record that the output is complete but for its name."""
        self._append(_READY, {})
        self.is_ready = True

    def _append(self, kind: str, content: Mapping[str, Any]) -> None:
        with self._file.open("ab") as stream:
            stream.write(_line(kind, content))
        fsync(self._file)

    def _read(self) -> None:
        if not self._file.is_file():
            return
        damaged = sum(not self._take(kind, content) for kind, content in _lines(self._file))
        if damaged:
            logger.warning(f"{damaged} damaged line(s) of {self._file}: what they say is redone.")
        if damaged or not self._file.read_bytes().endswith(b"\n"):
            self._rewrite()
        if self.fingerprint is None:
            raise OutputError(
                f"The journal {self._file} is damaged: it does not say what run it is of.",
                'Start afresh with resume="never" (--resume never), or restore the file.',
            )

    def _take(self, kind: str, content: dict[str, Any]) -> bool:
        """Apply one line; return False if its kind is unknown."""
        if kind == _RUN:
            self.fingerprint = content
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

    def _rewrite(self) -> None:
        """Rewrite the journal from its intact lines, so that lines can be appended."""
        if self.fingerprint is None:
            return
        lines = [_line(_RUN, self.fingerprint)]
        lines += [
            _line(_CHOICE, {"name": name, "value": value}) for name, value in self.choices.items()
        ]
        lines += [_line(_PROGRESS, vars(entry)) for entry in self.progress.values()]
        lines += [_line(_BLOCK, vars(entry)) for entry in self.entries.values()]
        if self.is_ready:
            lines.append(_line(_READY, {}))
        self._replace(lines)


def _flatten(items: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in items.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _first_difference(then: Any, now: Any) -> tuple[Any, Any]:
    """Return the first pair of lines that differ, for texts; otherwise the two values."""
    if not (isinstance(then, str) and isinstance(now, str)):
        return then, now
    for old, new in zip_longest(then.splitlines(), now.splitlines()):
        if old != new:
            return (old and old.strip()), (new and new.strip())
    return then, now


def _shorten(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line(kind: str, content: Mapping[str, Any]) -> bytes:
    text = json.dumps([kind, content], separators=(",", ":"), ensure_ascii=False)
    return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n".encode()


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for raw in file.read_bytes().split(b"\n"):
        if not raw:
            continue
        checksum, _, text = raw.decode("utf-8", errors="replace").partition(" ")
        if checksum != xxhash.xxh3_64_hexdigest(text.encode()):
            yield "damaged", {}
            continue
        kind, content = json.loads(text)
        yield kind, content
