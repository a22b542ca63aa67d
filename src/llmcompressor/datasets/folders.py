# SPDX-License-Identifier: Apache-2.0
"""Reading of local data files as rows by split."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from llmcompressor.datasets.readers import KINDS, kind_of, read_file
from llmcompressor.datasets.rows import Chain, Rows
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.runtime.registry import resolve

__all__ = [
    "Layout",
    "described",
    "has_card",
    "is_saved_dataset",
    "layout_of",
    "read_path",
    "split_of",
]


# --------------------
# Which split each file of a folder belongs to.

_KEYS = (("train", "train"), ("val", "validation"), ("test", "test"))
_FOLDERS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Names of folders that say which split the files below them are."""

_SHARD = re.compile(r"[-_.]\d{3,}-of-\d{3,}([-_.].*)?$")
_NUMBER = re.compile(r"[-_. ]*\d+$")
_CARD = "README.md"


@dataclass(frozen=True)
class Layout:
    """The files of a folder by split.

    Attributes:
        files: the split's name → its files, in the order of their rows.
        also: other names that files go by, such as ``train_sft`` for the one file that is the
            split ``train`` → those files.
    """

    files: Mapping[str, list[Path]]
    also: Mapping[str, list[Path]]


def split_of(name: str) -> str:
    """The split that a file's name speaks of.

    >>> split_of("my-Train"), split_of("val"), split_of("notes")
    ('train', 'validation', 'notes')
    """
    lowered = name.lower()
    return next((split for key, split in _KEYS if key in lowered), name)


def layout_of(folder: Path, files: Iterable[Path]) -> Layout:
    """The files by split, as far as their names say.

    The numbers of a split's pieces (``train-00000-of-00002``, ``train_1``) are no part of its
    name. A name that speaks of ``train``, ``val`` or ``test`` is that split, unless several
    names speak of the same: then each is a split of its own, for they are hardly one.

    Args:
        folder: the folder they were found in.
        files: the files; those of a split keep their order.
    """
    named: dict[str, list[Path]] = {}
    also: dict[str, list[Path]] = {}
    for file in files:
        name = _name(file.relative_to(folder))
        named.setdefault(name, []).append(file)
        also.setdefault(file.stem, []).append(file)
    alike: dict[str, list[str]] = {}
    for name in named:
        alike.setdefault(split_of(name), []).append(name)
    splits = {
        (key if len(names) == 1 else name): named[name]
        for key, names in alike.items()
        for name in names
    }
    return Layout(splits, {**also, **named})


def _name(file: Path) -> str:
    """A file's name without the number of a piece, or the name of a folder that is a split."""
    whole = _SHARD.sub("", file.stem)
    if any(key in whole.lower() for key, _ in _KEYS):
        return _NUMBER.sub("", whole) or whole
    folders = (_FOLDERS.get(part.lower()) for part in file.parts[:-1])
    return next((split for split in folders if split), whole)


def described(folder: Path, config: str | None) -> tuple[str | None, Layout, Mapping[str, Any]]:
    """What the card (``README.md``) of a data set of the hub says of its files.

    Args:
        folder: a copy of the data set.
        config: the configuration, ``None`` for the default one.

    Returns:
        The kind of the files (``None`` for one that only the library reads), which split each
        is, and the options they are to be read with.

    Raises:
        DatasetError: for a card that cannot be followed, or has no such configuration.
    """
    loader, splits, options = resolve("llmcompressor.datasets.hub:resolve_files")(
        str(folder), config
    )
    files = {name: [Path(file) for file in several] for name, several in splits.items()}
    ours = all(kind_of(file) == loader for several in files.values() for file in several)
    return loader if ours else None, Layout(files, {}), options


def has_card(folder: Path) -> bool:
    """Whether the folder's card says which files are which split."""
    card = folder / _CARD
    if not card.is_file():
        return False
    text = card.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
    front, end, _ = text.removeprefix("---").partition("\n---")
    return text.startswith("---") and bool(end) and "\nconfigs:" in front


# --------------------
# Reading of local data files as rows by split.

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
    or else those of the file names (:func:`~llmcompressor.datasets.folders.layout_of`); they are
    read lazily.

    Args:
        path: a file or folder.
        kind: one of :data:`~llmcompressor.datasets.readers.KINDS`, or ``None`` to infer it from
            the suffix.
        options: see :func:`~llmcompressor.datasets.readers.read_file`.
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
