# SPDX-License-Identifier: Apache-2.0
"""A path of the user's → rows by split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcompressor.datasets.formats import KINDS, kind_of, read_file
from llmcompressor.datasets.rows import Chain, Rows
from llmcompressor.datasets.splits import file_split
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

__all__ = ["is_saved_dataset", "read_path"]

_OPTIONS = frozenset({"delimiter", "field", "sample_by"})


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by ``Dataset.save_to_disk``."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def read_path(path: Path, kind: str | None, options: Mapping[str, Any]) -> dict[str, Rows]:
    """Read a file, or the files of a folder, as rows by split.

    A file is the split ``train``. A folder's files become splits by their names, and files of
    one split are joined in the order of their names.

    Args:
        path: a file or folder.
        kind: one of :data:`~llmcompressor.datasets.formats.KINDS`, or ``None`` for what the
            suffix says.
        options: see :func:`~llmcompressor.datasets.formats.read_file`.

    Raises:
        DatasetError: if there is nothing there, or nothing that can be read.
    """
    if unknown := sorted(set(options) - _OPTIONS):
        logger.warning(f"Local files are read without the options {', '.join(unknown)}.")
    if path.is_dir():
        return _read_folder(path, kind, options)
    if not path.exists():
        raise DatasetError(f"There is no file or folder {path}.", "Check dataset_path.")
    kind = kind or kind_of(path)
    if kind is None:
        raise DatasetError(
            f"The file {path} has a suffix that says nothing about its kind.",
            f"Name its kind: dataset={' or '.join(repr(kind) for kind in KINDS)}.",
        )
    return {"train": read_file(path, kind, options)}


def _read_folder(path: Path, kind: str | None, options: Mapping[str, Any]) -> dict[str, Rows]:
    files = _files(path)
    kinds = {file: kind_of(file) for file in files}
    present = sorted({found for found in kinds.values() if found})
    if kind is None and len(present) > 1:
        raise DatasetError(
            f"The folder {path} holds files of several kinds: {', '.join(present)}.",
            f"Name the one to use, for instance dataset={present[0]!r}.",
        )
    kind = kind or (present[0] if present else None)
    chosen = [file for file in files if kind and kinds[file] == kind]
    if not chosen or kind is None:
        suffixes = KINDS[kind] if kind else [s for several in KINDS.values() for s in several]
        raise DatasetError(
            f"The folder {path} holds no file that can be read.",
            f"Put files there that end in {', '.join(suffixes)}.",
        )
    splits: dict[str, list[Rows]] = {}
    for file in chosen:
        splits.setdefault(file_split(file.stem), []).append(read_file(file, kind, options))
    return {name: parts[0] if len(parts) == 1 else Chain(parts) for name, parts in splits.items()}


def _files(path: Path) -> list[Path]:
    """The files of a folder, or of those below it if it has none that can be read itself."""
    own = sorted(file for file in path.iterdir() if file.is_file())
    if any(kind_of(file) for file in own):
        return own
    return sorted(file for file in path.rglob("*") if file.is_file())
