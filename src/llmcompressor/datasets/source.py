# SPDX-License-Identifier: Apache-2.0
"""Resolution of the arguments ``dataset`` and ``dataset_path`` to raw rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import rows as table
from llmcompressor.datasets.folders import is_saved_dataset, read_path
from llmcompressor.datasets.preprocess import is_chat
from llmcompressor.datasets.readers import KINDS, kind_of
from llmcompressor.datasets.rows import Columns, Items, Rows, Stream
from llmcompressor.datasets.samples import MAIN_INPUTS
from llmcompressor.datasets.sampling import cut, parse_split, pick_split, split_for
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.runtime.registry import normalize_name, resolve

__all__ = [
    "KIND_NAMES",
    "Source",
    "check_data_exists",
    "is_loader",
    "open_source",
    "rows_of",
    "streamed_split",
]

KIND_NAMES: Mapping[str, str | None] = {
    **{kind: kind for kind in KINDS},
    "custom": None,
    "jsonl": "json",
    "txt": "text",
}
"""What ``dataset`` may be to name the kind of files under ``dataset_path``."""


_ADAPTERS = (
    ("datasets", "Dataset", "llmcompressor.datasets.hub:HubRows"),
    ("datasets", "IterableDataset", "llmcompressor.datasets.hub:HubStream"),
    ("torch.utils.data", "IterableDataset", "llmcompressor.datasets.rows:Stream"),
    ("pandas", "DataFrame", "llmcompressor.datasets.hub:rows_of_frame"),
    ("pyarrow", "Table", "llmcompressor.datasets.hub:rows_of_table"),
)
"""Classes by package and name → what makes rows of their objects, imported when there is one."""

_COLUMNS = MAIN_INPUTS | {"conversations", "messages", "text"}
"""A mapping with one of these for a key holds columns; any other holds splits."""

_WHERE = ("dataset_path", "dataset_config_name", "raw_kwargs", "streaming")
"""Arguments that say where data is, and how to read it."""
_WHOLE = "train"

_LONGEST_SHOWN = 300

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Source:
    """Raw data that is ready to be read.

    Attributes:
        name: its name in messages.
        rows: its rows.
        owner: the class of a registered data set, whose template turns its rows into text; a
            subclass of :class:`~llmcompressor.datasets.generation.TextGenerationDataset`. It
            gets a copy of the arguments, which it may change.
    """

    name: str
    rows: Rows | Stream
    owner: Any = None


def is_loader(data: Any) -> bool:
    """Return True if ``data`` is a torch DataLoader, which yields batches instead of rows."""
    return _is_a(data, "torch.utils.data", "DataLoader")


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
        source = Source("The given data", _rows_of_object(data, split))
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
        return Source(f"The data set {name}", rows_of(opened.load_dataset(), opened.rest), owner)
    if os.path.exists(os.path.expanduser(name)):
        return Source(f"The data {name}", _open_local(args, None, split, name))
    return Source(f"The data set {name}", _from_hub(args, name, split))


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
        return _rows_of_object(saved, split)
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
    return _rows_of_object(_load_hub(args, loader, None, options), split)


def _from_hub(args: DatasetArguments, name: str, split: str | None) -> Rows | Stream:
    if not args.streaming:
        return _rows_of_object(_load_hub(args, name, split, args.raw_kwargs), None)
    whole, rest = streamed_split(split)
    return _rows_of_object(_load_hub(args, name, whole, args.raw_kwargs), rest)


def streamed_split(split: str | None) -> tuple[str | None, str | None]:
    """Separate a split into its name, which a stream supports, and a slice to apply later.

    >>> streamed_split("train[:100]"), streamed_split("train")
    (('train', 'train[:100]'), ('train', None))
    """
    if split is None:
        return None, None
    parts = parse_split(split)
    if len(parts) > 1:
        raise DatasetError(
            f"Streams cannot be joined as in {split!r}.", "Name one split, or streaming=False."
        )
    return parts[0].name, None if parts[0].whole else split


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


def _rows_of_object(data: Any, split: str | None) -> Rows | Stream:
    """Rows of a data object; a mapping holds splits or columns."""
    if isinstance(data, Mapping) and not _has_columns(data):
        splits = {str(name): rows_of(value, None) for name, value in data.items()}
        return pick_split(splits, split, "The given data")
    _warn_unknown_split(split, str(getattr(data, "split", None) or ""))
    if isinstance(data, Mapping):
        return cut(Items([dict(data)]) if _is_one_row(data) else Columns(data), split)
    return rows_of(data, split)


def _warn_unknown_split(split: str | None, own: str) -> None:
    """Warn about a split name that has no effect on data without splits."""
    # unnamed rows may be meant by the name of the whole set
    known = own.partition("[")[0] or _WHOLE
    if split and any(part.name != known for part in parse_split(split)):
        what = f"is the split {own!r}" if own else "has no splits"
        effect = "only cuts it" if "[" in split else "has no effect"
        logger.warning(f"The given data {what}; splits={split!r} {effect}.")


def _has_columns(data: Mapping[str, Any]) -> bool:
    """Return True if a mapping holds columns instead of splits."""
    found = [data[name] for name in _COLUMNS & data.keys()]
    return bool(found) and not any(hasattr(each, "column_names") for each in found)


def _is_one_row(data: Mapping[str, Any]) -> bool:
    """Return True if a mapping is a single row: a text, a conversation or token ids."""
    ids = data.get("input_ids")
    first = None if ids is None else next(iter(ids), None)
    if any(is_chat(data.get(name)) for name in ("conversations", "messages")):
        return True
    return isinstance(data.get("text"), str) or isinstance(first, int) or _is_scalar(first)


def _is_scalar(value: Any) -> bool:
    return getattr(value, "ndim", None) == 0


def rows_of(data: Any, split: str | None = None) -> Rows | Stream:
    """Adapt a data object to rows, and apply the slice in ``split``."""
    if isinstance(data, Rows | Stream):
        return cut(data, split)
    for package, name, adapter in _ADAPTERS:
        if _is_a(data, package, name):
            return cut(resolve(adapter)(data), split)
    if isinstance(data, Mapping):
        return _rows_of_object(data, split)
    is_class = isinstance(data, type)
    if not is_class and hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        if _is_scalar(data):
            raise DatasetError("The data is a single number.", "Give a row for each sample.")
        return cut(Items(data), split)
    if not is_class and hasattr(data, "__iter__"):
        return cut(Stream(data), split)
    remedy = "Give a Dataset, a DataLoader, a list, a path or a name."
    if callable(data) and hasattr(data, "__name__"):
        what = "an object of it" if is_class else "what it returns"
        call = f", as in dataset={data.__name__}()" if data.__name__.isidentifier() else ""
        remedy = f"Give {what}{call}."
    raise DatasetError(f"The data is a {type(data).__name__}, which has no rows.", remedy)


def _is_a(data: Any, package: str, name: str) -> bool:
    """Like isinstance, but by class name, without importing the class's library."""
    return any(
        cls.__name__ == name and (cls.__module__ + ".").startswith(package + ".")
        for cls in type(data).__mro__
    )
