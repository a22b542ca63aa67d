# SPDX-License-Identifier: Apache-2.0
"""What an output that has its name remembers of the run that made it, until the call is over.

A run may be killed between the two. Then the same call finds that it has finished. It stands in a
file of its own: hashes of what decided the output, of what it was made of and of what was stored,
and choices that the data decided. Once the call is over the output is a directory in use like any
other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from llmcompressor.checkpoint.block_writer import digest_of
from llmcompressor.checkpoint.model_config import write_json
from llmcompressor.checkpoint.output_layout import OutputLayout

__all__ = [
    "RUN_FILE",
    "FinishedRun",
    "file_hashes",
    "forget_run",
    "hash_of",
    "stored_digests",
]

RUN_FILE = ".llmcompressor.json"


def hash_of(content: Any) -> str:
    """A hash of JSON data; the order of keys does not count."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


@dataclass(frozen=True)
class FinishedRun:
    """A run whose output is complete.

    Attributes:
        origin: hash of what names and headers tell of the original.
        fingerprint: hash of everything that decides the bytes of the output.
        source: hash of the tensors that were read.
        stored: hash of the tensors that were written.
        files: file that the output holds beside its weights → hash of its content.
        choices: what the data decided while the run was at work.
    """

    origin: str
    fingerprint: str
    source: str
    stored: str
    files: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Leave it in an output that is complete but for its name."""
        write_json(folder / RUN_FILE, asdict(self))

    @staticmethod
    def read(folder: Path) -> FinishedRun | None:
        """What an output remembers; ``None`` if that is nothing, or damaged."""
        with suppress(OSError, ValueError, TypeError):
            return FinishedRun(**json.loads((folder / RUN_FILE).read_text(encoding="utf-8")))
        return None

    def is_whole(
        self, folder: Path, layout: OutputLayout, groups: Mapping[str, Iterable[str]]
    ) -> bool:
        """Whether nothing of an output was lost or changed since; all of its weights are read.

        Args:
            folder: where it is.
            layout: of its weight files.
            groups: block → names of its stored tensors.
        """
        with suppress(OSError):
            if self.files == {name: _file_hash(folder / name) for name in self.files}:
                return self.stored == hash_of(stored_digests(folder, layout, groups))
        return False


def forget_run(folder: Path) -> None:
    """The call that made an output, or found it finished, is over."""
    (folder / RUN_FILE).unlink(missing_ok=True)


def file_hashes(folder: Path, layout: OutputLayout) -> dict[str, str]:
    """File of an output, but for its weights and what it remembers → hash of its content."""
    others = {RUN_FILE, *(file.name for file in layout.files)}
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    return {name: _file_hash(folder / name) for name in names if name not in others}


def _file_hash(file: Path) -> str:
    return xxhash.xxh3_128_hexdigest(file.read_bytes())


def stored_digests(
    folder: Path, layout: OutputLayout, groups: Mapping[str, Iterable[str]]
) -> dict[str, str]:
    """Block → hash of what stands in the places of its tensors; empty where a file is another.

    Raises:
        OSError: a file cannot be read.
    """
    opened: dict[str, int] = {}
    try:
        for file in layout.files:
            opened[file.name] = os.open(folder / file.name, os.O_RDONLY)
            if os.fstat(opened[file.name]).st_size != file.size:
                return {}
            if os.pread(opened[file.name], len(file.header), 0) != bytes(file.header):
                return {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = {
                block: pool.submit(digest_of, opened, layout, names)
                for block, names in groups.items()
            }
            return {block: future.result() for block, future in found.items()}
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
