# SPDX-License-Identifier: Apache-2.0
"""Resolution of the arguments ``dataset`` and ``dataset_path`` to raw rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import rows as table
from llmcompressor.datasets.files import KINDS, is_saved_dataset, kind_of, read_path
from llmcompressor.datasets.rows import Rows, Stream, has_columns, is_a, join, rows_of
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.runtime.registry import normalize_name, resolve

__all__ = [
    "KIND_NAMES",
    "Part",
    "Source",
    "check_data_exists",
    "is_loader",
    "open_source",
    "parse_split",
    "rows_of_object",
    "split_for",
    "streamed_split",
]

KIND_NAMES: Mapping[str, str | None] = {
    **{kind: kind for kind in KINDS},
    "custom": None,
    "jsonl": "json",
    "txt": "text",
}
"""What ``dataset`` may be to name the kind of files under ``dataset_path``."""


_WHERE = ("dataset_path", "dataset_config_name", "raw_kwargs", "streaming")
"""Arguments that say where data is, and how to read it."""

_LONGEST_SHOWN = 300

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Source:
    """Raw data that is ready to be read.

    Attributes:
        name: its name in messages.
        rows: its rows.
        owner: the class of a registered data set, whose template turns its rows into text; a
            subclass of :class:`~llmcompressor.datasets.named.TextGenerationDataset`. It
            gets a copy of the arguments, which it may change.
    """

    name: str
    rows: Rows | Stream
    owner: Any = None


def is_loader(data: Any) -> bool:
    """Return True if ``data`` is a torch DataLoader, which yields batches instead of rows."""
    return is_a(data, "torch.utils.data", "DataLoader")


def open_source(
    args: DatasetArguments, role: str = "calibration", *, processor: Any = None
) -> Source | None:
    """Open the data that the arguments name, and pick its split.

    It needs no model, so that an entrypoint can call it first and a wrong path fails early.

    Args:
        args: ``dataset``, ``dataset_path``, ``dataset_config_name``, ``splits``, ``streaming``
            and ``raw_kwargs`` are read.
        role: "calibration" or "train"; selects one of several splits.
        processor: passed to the class of a registered data set; built-in ones do not need it.

    Returns:
        The rows, or ``None`` if no data or a DataLoader was given.

    Raises:
        DatasetError: the data does not exist, cannot be read, has no such split or is empty.
    """
    data, split = args.dataset, split_for(role, args.splits)
    if is_loader(data):
        _warn_unread_arguments(args, (*_WHERE, "splits"))
    if is_loader(data) or (data is None and args.dataset_path is None):
        return None
    if isinstance(data, str) or data is None:
        source = _open_named(args, split, processor)
    else:
        _warn_unread_arguments(args, _WHERE)
        source = Source("The given data", rows_of_object(data, split))
    if not isinstance(source.rows, Stream) and not len(source.rows):
        if split is not None and "[" in split:
            raise DatasetError(
                f"{source.name} has no rows in {split!r}: this part of it is empty.",
                "Give a larger part, or leave splits out.",
            )
        raise DatasetError(f"{source.name} is empty.", "Give at least one sample.")
    return source


def _warn_unread_arguments(args: DatasetArguments, names: Iterable[str]) -> None:
    """Warn about arguments for the location of data that have no effect on data objects."""
    for name in names:
        if getattr(args, name):
            logger.warning(f"{name} is not read: dataset is the data itself.")


def check_data_exists(args: DatasetArguments) -> None:
    """Refuse a name or path without data; nothing is read.

    Raises:
        DatasetError: there is no such data; suggests similar names.
    """
    name = args.dataset
    if name is not None and not isinstance(name, str):
        return
    owner = table.find(name) if name else None
    if args.dataset_path is not None:
        if name and owner is None:
            _kind(name)
        _check_path(str(args.dataset_path))
        return
    if not name or owner is not None or os.path.exists(os.path.expanduser(name)):
        return
    if normalize_name(name) in KIND_NAMES:
        raise DatasetError(
            f"The argument dataset={name!r} says what kind of files to read, but not which.",
            "Give their path with dataset_path.",
        )
    if not _HUB_NAME.fullmatch(name) or kind_of(Path(name)) is not None:
        raise DatasetError(
            f"There is no data set, file or folder {_shortened(name)!r}.",
            f"{did_you_mean(name, table.names())} Data sets on the hub are named 'owner/name'.",
        )


def _check_path(path: str) -> None:
    where = os.path.expanduser(path)
    # Path.exists fails on a name that is too long
    if not path.startswith("dvc://") and not os.path.exists(where):
        raise DatasetError(
            f"There is no file or folder {_shortened(where)}.", "Check dataset_path."
        )


def _open_named(args: DatasetArguments, split: str | None, processor: Any) -> Source:
    """Open data by name or path; a registered name takes precedence over a folder."""
    check_data_exists(args)
    name = args.dataset
    owner = table.find(name) if name else None
    if args.dataset_path is not None:
        kind = _kind(name) if name and owner is None else None
        rows = _open_local(args, kind, split, owner=owner)
        return Source(f"The data {args.dataset_path}", rows, owner)
    if owner is not None:
        opened = owner(dataset_args=replace(args), split=split, processor=processor)
        return Source(
            f"The data set {name}", rows_of_object(opened.load_dataset(), opened.rest), owner
        )
    if os.path.exists(os.path.expanduser(name)):
        return Source(f"The data {name}", _open_local(args, None, split, name))
    whole, rest = streamed_split(split) if args.streaming else (split, None)
    rows = rows_of_object(_load_hub(args, name, whole, args.raw_kwargs), rest)
    return Source(f"The data set {name}", rows)


def _shortened(name: str | Path) -> str:
    """Shorten a name for messages, as a text given by mistake may be long."""
    text = str(name)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _kind(name: str) -> str | None:
    if normalize_name(name) not in KIND_NAMES:
        raise DatasetError(
            f"The argument dataset={name!r} names no kind of file that dataset_path could hold.",
            did_you_mean(name, [*KIND_NAMES, *table.names()]),
        )
    return KIND_NAMES[normalize_name(name)]


def _open_local(
    args: DatasetArguments,
    kind: str | None,
    split: str | None,
    path: str | None = None,
    owner: Any = None,
) -> Rows | Stream:
    """Open rows of a local path or a DVC repository.

    Args:
        args: the user's arguments.
        kind: the kind of the files, ``None`` to infer it from their suffix.
        split: the split, ``None`` for the only one or ``train``.
        path: ``None`` for ``dataset_path``.
        owner: the class of the registered data set of which this is a copy.
    """
    path = path or str(args.dataset_path)
    if path.startswith("dvc://"):
        return _from_dvc(args, kind, path, split)
    where = Path(os.path.expanduser(path))
    if is_saved_dataset(where):
        saved = resolve("llmcompressor.datasets.hub:load_saved")(str(where))
        if isinstance(saved, Mapping):
            split = _resolve_owner_split(owner, args, split, saved)
        return rows_of_object(saved, split)
    config = args.dataset_config_name or getattr(owner, "config_name", None)
    splits = read_path(where, kind, args.raw_kwargs, config)
    split = _resolve_owner_split(owner, args, split, splits)
    return pick_split(splits, split, f"The data {path}")


def _resolve_owner_split(
    owner: Any, args: DatasetArguments, split: str | None, splits: Mapping[str, Any]
) -> str | None:
    """Map a split to a registered data set's own name for it, if the copy has only that.

    For example ``train`` of a copy of ``ultrachat_200k`` is ``train_sft``.
    """
    if owner is None or (split is None and ("train" in splits or len(splits) == 1)):
        return split
    own: str | None = owner(dataset_args=replace(args), split=split).split
    if split is not None and all(part.name in splits for part in parse_split(split)):
        return split
    if own is None or any(part.name not in splits for part in parse_split(own)):
        return split
    return own


def _from_dvc(
    args: DatasetArguments, kind: str | None, path: str, split: str | None
) -> Rows | Stream:
    suffixes = {suffix: kind for kind, several in KINDS.items() for suffix in several}
    loader = kind or suffixes.get(Path(path).suffix.lower())
    if loader is None:
        raise DatasetError(f"The kind of {path} is not known.", "Name it, as in dataset='json'.")
    options: dict[str, Any] = {"data_files": path, **args.raw_kwargs}
    if args.dvc_data_repository:
        options.setdefault("storage_options", {"url": args.dvc_data_repository})
    return rows_of_object(_load_hub(args, loader, None, options), split)


def _load_hub(
    args: DatasetArguments, path: str, split: str | None, options: Mapping[str, Any]
) -> Any:
    return resolve("llmcompressor.datasets.hub:load_hub")(
        path,
        config=args.dataset_config_name,
        split=split,
        streaming=args.streaming,
        options=options,
    )


def rows_of_object(data: Any, split: str | None = None) -> Rows | Stream:
    """Rows of a data object, cut by ``split``; a mapping holds splits or columns."""
    if isinstance(data, Mapping) and not has_columns(data):
        return pick_split(data, split, "The given data")
    own = str(getattr(data, "split", None) or "")
    rows = rows_of(data)
    if split is None:
        return rows
    parts = parse_split(split)
    # unnamed rows may be meant by the name of the whole set
    if any(part.name != (own.partition("[")[0] or "train") for part in parts):
        what = f"is the split {own!r}" if own else "has no splits"
        effect = "only cuts it" if "[" in split else "has no effect"
        logger.warning(f"The given data {what}; splits={split!r} {effect}.")
    return _cut([(rows, part) for part in parts], split)


# --------------------
# Splits: which one is meant, and the slices in ``"train[:5%]"``.

_PART = re.compile(
    r"(?P<name>[^\[\]+]+?)\s*"
    r"(?:\[\s*(?P<start>-?\d+%?)?\s*:\s*(?P<stop>-?\d+%?)?\s*\])?"
)


@dataclass(frozen=True)
class Part:
    """A piece of a split's description: ``train[10:20]`` or ``train[:5%]``.

    Attributes:
        name: the split.
        start: its first row as written, ``None`` for the first of all.
        stop: the row after its last one as written, ``None`` for the end.
    """

    name: str
    start: str | None = None
    stop: str | None = None

    @property
    def whole(self) -> bool:
        """True if nothing is cut off."""
        return self.start is None and self.stop is None

    def bounds(self, size: int) -> tuple[int, int]:
        """First row and the row after the last, of ``size`` rows.

        >>> Part("train", None, "5%").bounds(200), Part("train", "-10", None).bounds(200)
        ((0, 10), (190, 200))
        """
        return _place(self.start, size, 0), _place(self.stop, size, size)


def _place(text: str | None, size: int, default: int) -> int:
    if text is None:
        return default
    place = round(int(text[:-1]) * size / 100) if text.endswith("%") else int(text)
    return min(size, max(0, place + size if place < 0 else place))


def parse_split(text: str) -> list[Part]:
    """The pieces of ``"train[:5%]+test"``.

    Raises:
        DatasetError: for a description that is not of this form.
    """
    parts = []
    for piece in text.split("+"):
        match = _PART.fullmatch(piece.strip())
        if match is None:
            raise DatasetError(
                f"The split {text!r} cannot be read.",
                "Write it as 'train', 'train[:512]', 'train[10%:20%]' or 'train[:5%]+test'.",
            )
        part = Part(match["name"].strip(), match["start"], match["stop"])
        for place in (part.start, part.stop):
            if place and place.endswith("%") and abs(int(place[:-1])) > 100:
                raise DatasetError(
                    f"The split {text!r} goes to {place} of its rows.",
                    "A split has 100% of them.",
                )
        parts.append(part)
    return parts


def split_for(role: str, splits: str | Sequence[str] | Mapping[str, str] | None) -> str | None:
    """The split that plays a role, of the user's ``splits`` in any of its forms.

    A string is the split. Of a dict it is the role's entry. Of a list it is the element whose
    name is the role's, or else the first.

    Args:
        role: "calibration" or "train".
        splits: what the user gave.
    """
    if splits is None or isinstance(splits, str):
        return splits
    if isinstance(splits, Mapping):
        if role not in splits:
            raise DatasetError(
                f"The argument 'splits' has no key {role!r}, only {', '.join(sorted(splits))}.",
                f"Name the split to use, for instance splits={{'{role}': 'train[:5%]'}}.",
            )
        if ignored := sorted(set(splits) - {role}):
            logger.warning(f"The splits {', '.join(ignored)} are not used for {role}.")
        return splits[role]
    named = [split for split in splits if parse_split(split)[0].name == role]
    return (named or list(splits))[0]


def pick_split(splits: Mapping[str, Any], wanted: str | None, what: str) -> Rows | Stream:
    """The rows of one split: the wanted one, the only one, or ``train``.

    Args:
        splits: data by the name of its split.
        wanted: a description such as ``"train[:5%]"``, or ``None``.
        what: the data's name, for an error.
    """
    if not splits:
        raise DatasetError(f"{what} has no splits.", "Give data that is not empty.")
    if wanted is None:
        only = next(iter(splits)) if len(splits) == 1 else "train"
        if only not in splits:
            raise DatasetError(
                f"{what} has several splits: {', '.join(sorted(splits))}.",
                f"Choose one, for instance splits={min(splits)!r}.",
            )
        return rows_of_object(splits[only])
    pieces = []
    for part in parse_split(wanted):
        if part.name not in splits:
            raise DatasetError(
                f"{what} has no split {part.name!r}; its splits are {', '.join(sorted(splits))}.",
                did_you_mean(part.name, splits),
            )
        pieces.append((rows_of_object(splits[part.name]), part))
    return _cut(pieces, wanted)


def _cut(pieces: Sequence[tuple[Rows | Stream, Part]], wanted: str) -> Rows | Stream:
    """Cut each piece by its slice, and join them."""
    parts = [rows if part.whole else _cut_part(rows, part) for rows, part in pieces]
    if len(parts) == 1:
        return parts[0]
    sized = [part for part in parts if isinstance(part, Rows)]
    if len(sized) < len(parts):
        raise _unjoinable(wanted)
    return join(sized)


def _cut_part(rows: Rows | Stream, part: Part) -> Rows | Stream:
    if isinstance(rows, Rows):
        return rows.cut(*part.bounds(len(rows)))
    if any(place and not place.isdecimal() for place in (part.start, part.stop)):
        raise DatasetError(
            f"A stream cannot be cut at {part.start or ''}:{part.stop or ''}: its length is "
            "not known.",
            "Give row numbers such as 'train[100:600]', or streaming=False.",
        )
    return rows.cut(int(part.start or 0), int(part.stop) if part.stop else None)


def _unjoinable(wanted: str) -> DatasetError:
    return DatasetError(
        f"Streams cannot be joined as in {wanted!r}.", "Name one split, or streaming=False."
    )


def streamed_split(split: str | None) -> tuple[str | None, str | None]:
    """Separate a split into its name, which a stream supports, and a slice to apply later.

    >>> streamed_split("train[:100]"), streamed_split("train")
    (('train', 'train[:100]'), ('train', None))
    """
    if split is None:
        return None, None
    parts = parse_split(split)
    if len(parts) > 1:
        raise _unjoinable(split)
    return parts[0].name, None if parts[0].whole else split
