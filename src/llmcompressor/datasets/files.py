# SPDX-License-Identifier: Apache-2.0
"""Reading of local data files as rows by split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from llmcompressor.datasets.formats import KINDS, kind_of, read_file
from llmcompressor.datasets.layout import Layout, described, has_card, layout_of
from llmcompressor.datasets.rows import Chain, Rows
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.registry import resolve

__all__ = ["is_saved_dataset", "read_path"]

_OPTIONS = frozenset({"delimiter", "field", "sample_by"})

_PACKED = frozenset({".7z", ".bz2", ".gz", ".rar", ".tar", ".xz", ".zip", ".zst"})


def is_saved_dataset(path: Path) -> bool:
    """Return True if a folder was written by ``Dataset.save_to_disk``."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


class _Splits(Mapping[str, Rows]):
    """Lazily read rows by split, with alternative split names."""

    def __init__(self, layout: Layout, kind: str, options: Mapping[str, Any]) -> None:
        self._layout, self._kind, self._options = layout, kind, options

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.files)

    def __len__(self) -> int:
        return len(self._layout.files)

    def __contains__(self, name: object) -> bool:
        return name in self._layout.files or name in self._layout.also

    def __getitem__(self, name: str) -> Rows:
        files = self._layout.files.get(name) or self._layout.also[name]
        parts = [read_file(file, self._kind, self._options) for file in files]
        return parts[0] if len(parts) == 1 else Chain(parts)


def read_path(
    path: Path, kind: str | None, options: Mapping[str, Any], config: str | None = None
) -> Mapping[str, Rows]:
    """Read a file, or the files of a folder, as rows by split.

    A file is the split ``train``. The splits of a folder's files are those of its data set card,
    or else those of the file names (:func:`~llmcompressor.datasets.layout.layout_of`); they are
    read lazily.

    Args:
        path: a file or folder.
        kind: one of :data:`~llmcompressor.datasets.formats.KINDS`, or ``None`` to infer it from
            the suffix.
        options: see :func:`~llmcompressor.datasets.formats.read_file`.
        config: of a folder with a card, the configuration; ``None`` for the default one.

    Raises:
        DatasetError: the path does not exist, or holds no readable file.
    """
    if unknown := sorted(set(options) - _OPTIONS):
        logger.warning(f"Local files are read without the options {', '.join(unknown)}.")
    if path.is_dir():
        return _read_folder(path, kind, options, config)
    if not path.exists():
        raise DatasetError(f"There is no file or folder {path}.", "Check dataset_path.")
    kind = kind or kind_of(path)
    if path.suffix.lower() in _PACKED:
        raise DatasetError(f"The file {path} is packed.", "Unpack it, and name what was in it.")
    if kind is None:
        raise DatasetError(
            f"The file {path} has a suffix that says nothing about its kind.",
            f"Name its kind: dataset={' or '.join(repr(kind) for kind in KINDS)}.",
        )
    return {"train": read_file(path, kind, options)}


def _read_folder(
    path: Path, kind: str | None, options: Mapping[str, Any], config: str | None
) -> Mapping[str, Rows]:
    if has_card(path):
        meant, layout, own = described(path, config)
        if meant is None and kind is None:
            read = resolve("llmcompressor.datasets.hub:rows_by_split")
            return cast("Mapping[str, Rows]", read(str(path), config))
        if meant is not None and kind in (None, meant):
            return _Splits(layout, meant, {**own, **options})
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
    return _Splits(layout_of(path, chosen), kind, options)


def _files(path: Path) -> list[Path]:
    """Files of a folder, or of all its subfolders if it has no readable file itself."""
    own = sorted(file for file in path.iterdir() if file.is_file())
    if any(kind_of(file) for file in own):
        return own
    return sorted(file for file in path.rglob("*") if file.is_file())
