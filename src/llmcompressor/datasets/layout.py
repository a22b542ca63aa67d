# SPDX-License-Identifier: Apache-2.0
"""Which split each file of a folder belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcompressor.datasets.formats import kind_of
from llmcompressor.registry import resolve

__all__ = ["Layout", "described", "has_card", "layout_of", "split_of"]

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
    loader, splits, options = resolve("llmcompressor.datasets.hub:files_of")(str(folder), config)
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
