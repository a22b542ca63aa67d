# SPDX-License-Identifier: Apache-2.0
"""Resolution of the arguments ``dataset`` and ``dataset_path`` to raw rows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import rows as table
from llmcompressor.datasets.files import KINDS, kind_of, read_path
from llmcompressor.datasets.rows import Rows, Stream, has_columns, is_a, join, rows_of
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.runtime.registry import normalize_name, resolve

KIND_NAMES: Mapping[str, str | None] = {
    **{kind: kind for kind in KINDS},
    "custom": None,
    "jsonl": "json",
    "txt": "text",
}
"""What ``dataset`` may be to name the kind of files under ``dataset_path``."""

_WHERE = ("dataset_path", "dataset_config_name", "raw_kwargs", "streaming")
"""Arguments that say where data is, and how to read it."""

GOOD_CHOICES = (
    'Give one of these: dataset="default" (--dataset default), a mix of text, conversations, code '
    'and languages; one data set of the hub, such as dataset="ultrachat_200k" (--dataset '
    'ultrachat_200k); or texts of your own, as dataset=["...", "..."] or as a file or folder, '
    'dataset="texts.jsonl" (--dataset texts.jsonl).'
)
"""What to do where there is no data."""

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
    is_named = isinstance(data, str) or data is None
    for name in () if is_named else (*_WHERE, "splits") if is_loader(data) else _WHERE:
        if getattr(args, name):
            logger.warning(f"{name} is not read: dataset is the data itself.")
    if is_loader(data) or (data is None and args.dataset_path is None):
        return None
    if is_named:
        source = _open_named(args, split, processor)
    else:
        source = Source("The given data", rows_of_object(data, split))
    if isinstance(source.rows, Stream) or len(source.rows):
        return source
    if split is not None and "[" in split:
        raise DatasetError(
            f"{source.name} has no rows in {split!r}: this part of it is empty.",
            "Give a larger part, or leave splits out.",
        )
    raise DatasetError(f"{source.name} is empty.", "Give at least one sample.")


def check_data_exists(args: DatasetArguments) -> None:
    """Refuse a name or path without data; nothing is read.

    Raises:
        DatasetError: there is no such data; suggests similar names.
    """
    name, path = args.dataset, args.dataset_path
    if name is not None and not isinstance(name, str):
        return
    is_registered = name is not None and table.find(name) is not None
    if path is not None:
        if name and not is_registered and normalize_name(name) not in KIND_NAMES:
            raise DatasetError(
                f"The argument dataset={name!r} names no kind of file that dataset_path could "
                "hold.",
                did_you_mean(name, [*KIND_NAMES, *table.names()]),
            )
        if not str(path).startswith("dvc://") and not _exists(str(path)):
            raise DatasetError(
                f"There is no file or folder {os.path.expanduser(path)!s:.{_LONGEST_SHOWN}}"
                f"{'…' * (len(str(path)) > _LONGEST_SHOWN)}.",
                "Check dataset_path.",
            )
    elif name and not is_registered and not _exists(name):
        if normalize_name(name) in KIND_NAMES:
            raise DatasetError(
                f"The argument dataset={name!r} says what kind of files to read, but not which.",
                "Give their path with dataset_path.",
            )
        if not _HUB_NAME.fullmatch(name) or kind_of(Path(name)) is not None:
            shown = name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}…"
            raise DatasetError(
                f"There is no data set, file or folder {shown!r}.",
                f"{did_you_mean(name, table.names())} Data sets on the hub are named 'owner/name'.",
            )


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))  # Path.exists fails on too long a name


def _open_named(args: DatasetArguments, split: str | None, processor: Any) -> Source:
    """Open data by name or path; a registered name takes precedence over a folder."""
    check_data_exists(args)
    name = args.dataset
    owner = table.find(name) if name else None
    if args.dataset_path is not None:
        kind = KIND_NAMES[normalize_name(name)] if name and owner is None else None
        path = str(args.dataset_path)
        return Source(f"The data {path}", _open_local(args, path, kind, split, owner), owner)
    if owner is not None:
        opened = owner(dataset_args=replace(args), split=split, processor=processor)
        rows = rows_of_object(opened.load_dataset(), opened.rest)
        return Source(f"The data set {name}", rows, owner)
    if _exists(name):
        return Source(f"The data {name}", _open_local(args, name, None, split, None))
    whole, rest = streamed_split(split) if args.streaming else (split, None)
    loaded = _load_hub(args, name, whole, args.raw_kwargs)
    return Source(f"The data set {name}", rows_of_object(loaded, rest))


def _open_local(
    args: DatasetArguments, path: str, kind: str | None, split: str | None, owner: Any
) -> Rows | Stream:
    """Open rows of a local path or a DVC repository.

    Args:
        args: the user's arguments.
        path: the file, the folder or a ``dvc://`` address.
        kind: the kind of the files, ``None`` to infer it from their suffix.
        split: the split, ``None`` for the only one or ``train``.
        owner: the class of the registered data set of which this is a copy.
    """
    where = Path(os.path.expanduser(path))
    if path.startswith("dvc://"):
        loader = kind or kind_of(where)
        if loader is None:
            raise DatasetError(
                f"The kind of {path} is not known.", "Name it, as in dataset='json'."
            )
        options: dict[str, Any] = {"data_files": path, **args.raw_kwargs}
        if args.dvc_data_repository:
            options.setdefault("storage_options", {"url": args.dvc_data_repository})
        return rows_of_object(_load_hub(args, loader, None, options), split)
    if any((where / name).is_file() for name in ("state.json", "dataset_dict.json")):
        splits = resolve("llmcompressor.datasets.hub:load_saved")(str(where))
        if not isinstance(splits, Mapping):
            return rows_of_object(splits, split)
    else:
        config = args.dataset_config_name or getattr(owner, "config_name", None)
        splits = read_path(where, kind, args.raw_kwargs, config)
    if owner is not None and (split or not ("train" in splits or len(splits) == 1)):
        # of a copy of ultrachat_200k, ``train`` is ``train_sft``
        own: str | None = owner(dataset_args=replace(args), split=split).split
        for one in (split, own):
            if one is not None and all(part.name in splits for part in parse_split(one)):
                split = one
                break
    return pick_split(splits, split, f"The data {path}")


def _load_hub(
    args: DatasetArguments, path: str, split: str | None, options: Mapping[str, Any]
) -> Any:
    load = resolve("llmcompressor.datasets.hub:load_hub")
    config, streaming = args.dataset_config_name, args.streaming
    return load(path, config=config, split=split, streaming=streaming, **options)


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
        places = []
        for text in (self.start or "0", self.stop or str(size)):
            place = round(int(text[:-1]) * size / 100) if text.endswith("%") else int(text)
            places.append(min(size, max(0, place + size if place < 0 else place)))
        return places[0], places[1]


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
    parts = [] if split is None else parse_split(split)
    if len(parts) > 1:
        raise _unjoinable(str(split))
    return (parts[0].name, None if parts[0].whole else split) if parts else (None, None)
