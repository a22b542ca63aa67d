# SPDX-License-Identifier: Apache-2.0
"""Identity of a completed run, stored in its output until the call has returned.

A run may be killed after its output has got its name and before the call returns. The same call,
repeated, then recognizes the output as finished. A file of its own holds hashes of what decided the
output, of the tensors read and stored, and the choices that the data decided. Once the call
returns, the output is a directory in use like any other.
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
    """Return a hash of JSON data that does not depend on the order of keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


@dataclass(frozen=True)
class FinishedRun:
    """The identity of a run whose output is complete.

    Attributes:
        origin: hash of the original's names and headers.
        fingerprint: hash of everything that decides the bytes of the output.
        source: hash of the tensors that were read.
        stored: hash of the tensors that were written.
        files: file of the output besides its weights → hash of its content.
        choices: choices that the data decided during the run.
    """

    origin: str
    fingerprint: str
    source: str
    stored: str
    files: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the identity file into an output that is complete but for its name."""
        write_json(folder / RUN_FILE, asdict(self))

    @staticmethod
    def read(folder: Path) -> FinishedRun | None:
        """Return the identity stored in an output; ``None`` if it is missing or damaged."""
        with suppress(OSError, ValueError, TypeError):
            return FinishedRun(**json.loads((folder / RUN_FILE).read_text(encoding="utf-8")))
        return None

    def is_whole(
        self, folder: Path, layout: OutputLayout, groups: Mapping[str, Iterable[str]]
    ) -> bool:
        """Return True if no file of an output was lost or changed since; reads all of its weights.

        Args:
            folder: the output.
            layout: the layout of its weight files.
            groups: block → names of its stored tensors.
        """
        with suppress(OSError):
            if self.files == {name: _file_hash(folder / name) for name in self.files}:
                return self.stored == hash_of(stored_digests(folder, layout, groups))
        return False


def forget_run(folder: Path) -> None:
    """Remove the identity file, as the call that made the output has returned."""
    (folder / RUN_FILE).unlink(missing_ok=True)


def file_hashes(folder: Path, layout: OutputLayout) -> dict[str, str]:
    """Return the hash of each file of an output, except its weights and the identity file."""
    others = {RUN_FILE, *(file.name for file in layout.files)}
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    return {name: _file_hash(folder / name) for name in names if name not in others}


def _file_hash(file: Path) -> str:
    return xxhash.xxh3_128_hexdigest(file.read_bytes())


def stored_digests(
    folder: Path, layout: OutputLayout, groups: Mapping[str, Iterable[str]]
) -> dict[str, str]:
    """Return the hash of each block's stored bytes; empty if a weight file has another layout.

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
