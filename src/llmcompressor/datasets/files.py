# SPDX-License-Identifier: Apache-2.0
"""Local data files by split: JSON, JSON lines, CSV, Parquet and plain text.

The ``datasets`` library reads the files. What is decided here is which file belongs to which
split, what a JSON document holds, and the few options that keep cells of a CSV file text.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from llmcompressor.datasets.rows import Rows, has_columns, join, rows_of, rows_of_columns
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.runtime.limits import check_regular, parse_json
from llmcompressor.runtime.registry import resolve

KINDS: Mapping[str, tuple[str, ...]] = {
    "csv": (".csv", ".tsv"),
    "json": (".json", ".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt",),
}
"""Kinds of file → the suffixes they go by."""

Options: TypeAlias = Mapping[str, Any]

_OPTIONS = frozenset({"delimiter", "field", "sample_by"})
_PACKED = frozenset({".7z", ".bz2", ".gz", ".rar", ".tar", ".xz", ".zip", ".zst"})


def kind_of(path: Path) -> str | None:
    """The kind of a file by its suffix, or ``None`` for a suffix of no kind."""
    suffix = path.suffix.lower()
    return next((kind for kind, suffixes in KINDS.items() if suffix in suffixes), None)


# --------------------
# The files of a split, read by the library.


def read_files(files: Sequence[Path], kind: str, options: Options) -> Any:
    """Read the files of one split.

    Args:
        files: the files, in the order of their rows.
        kind: one of :data:`KINDS`, or another loader of the library's.
        options: ``field`` (JSON: the key the rows are under), ``delimiter`` (CSV) and
            ``sample_by`` (text: "line", "paragraph" or "document").

    Returns:
        A ``datasets.Dataset``, :class:`Rows`, or a list.

    Raises:
        DatasetError: a file cannot be read as that kind.
    """
    readers = {"csv": _read_csv, "json": _read_json, "text": _read_text}
    named = f"The file {files[0]}"
    if len(files) > 1:
        named += f" (or one of the {len(files) - 1} after it)"
    for file in files:
        check_regular(file, DatasetError)
    try:
        if kind not in readers or any(file.suffix.lower() in _PACKED for file in files):
            return _load(kind, files)
        return readers[kind](files, options)
    except DatasetError:
        raise
    except Exception as error:  # of the library, pandas or pyarrow
        is_text = isinstance(error, UnicodeDecodeError)
        reason = f"it is not UTF-8 ({error})" if is_text else str(error)
        raise DatasetError(
            f"{named} cannot be read as {kind}: {reason}.",
            f"{'Save it as UTF-8' if is_text else 'Check the file'}, or name its kind with "
            "dataset=.",
        ) from error


def _load(loader: str, files: Sequence[Path], **options: Any) -> Any:
    return resolve("llmcompressor.datasets.hub:load_files")(loader, files, **options)


def _read_json(files: Sequence[Path], options: Options) -> Any:
    """Rows of JSON lines, or what the only document holds."""
    field = options.get("field")
    if field is None and all(map(_has_rows_by_line, files)):
        return _load("json", files)
    parts = (rows_of(_document(file, field)) for file in files)
    return join([part for part in parts if isinstance(part, Rows)])


def _has_rows_by_line(path: Path) -> bool:
    """Return True if the first line is an object that is a row, and not all rows of the file."""
    with path.open("rb") as file:
        written = (line for line in file if line.strip())
        first, second = next(written, b""), next(written, b"")
    try:
        value = parse_json(first)
    except ValueError:
        return False
    is_alone = not second and path.suffix.lower() == ".json"
    return isinstance(value, dict) and not (is_alone and _holds_lists(value))


def _holds_lists(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(isinstance(each, list) for each in value.values())


def _document(path: Path, field: str | None) -> Any:
    """Rows or columns that a JSON document holds, or that are under one of its keys."""
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip():
        return []
    try:
        value = parse_json(text)
    except ValueError:
        if text.lstrip()[0] not in '["' or field is not None:
            raise
        value = [parse_json(line) for line in text.splitlines() if line.strip()]
    if field is not None:
        keys = value if isinstance(value, dict) else {}
        if field not in keys:
            raise DatasetError(f"The file {path} has no key {field!r}.", did_you_mean(field, keys))
        value = value[field]
    if isinstance(value, dict):
        return _rows_of_object(value, path)
    if not isinstance(value, list):
        raise ValueError("it holds neither a list nor an object")
    return value


def _rows_of_object(value: dict[str, Any], path: Path) -> Any:
    """Take a JSON object for columns, for a list of rows under its only key, or for one row."""
    if not _holds_lists(value):
        return [value]
    if has_columns(value):
        return value
    if not all(isinstance(row, dict) for rows in value.values() for row in rows):
        return rows_of_columns(value)
    if len(value) > 1:
        raise DatasetError(
            f"The file {path} has rows under several keys: {', '.join(value)}.",
            f"Name one, as in raw_kwargs={{'field': {min(value)!r}}}.",
        )
    return next(iter(value.values()))


def _read_csv(files: Sequence[Path], options: Options) -> Any:
    """Rows below the headers; each cell is text, also one that looks like a number or is empty."""
    given = options.get("delimiter")
    if given is not None and not (isinstance(given, str) and len(given) == 1):
        raise DatasetError(
            f"The option 'delimiter' cannot be {given!r}.",
            "Give one character, as in raw_kwargs={'delimiter': ';'}.",
        )
    delimiter = given or ("\t" if files[0].suffix.lower() == ".tsv" else ",")
    with files[0].open(encoding="utf-8-sig", newline="") as file:
        header = next(csv.reader(file, delimiter=delimiter), [])
    other = next((mark for mark in ";\t|," if len(header) == 1 and mark in header[0]), None)
    if other is not None and given is None:
        raise DatasetError(
            f"The file {files[0]} is read with {delimiter!r} between its cells, and it seems to "
            f"have {other!r}: its header is {header[0]!r}.",
            f"Give raw_kwargs={{'delimiter': {other!r}}} (--raw-kwargs 'delimiter={other}'), "
            f"or {delimiter!r} there if it is meant so.",
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Length of header")  # a row has more cells than it
        return _load(
            "csv",
            files,
            delimiter=delimiter,
            text_columns=header,
            keep_default_na=False,
            index_col=False,
        )


def _read_text(files: Sequence[Path], options: Options) -> list[str]:
    """Lines, paragraphs or whole files that are not blank."""
    sample_by, known = options.get("sample_by", "line"), ("line", "paragraph", "document")
    if sample_by not in known:
        raise DatasetError(
            f"Text cannot be sampled by {sample_by!r}.", did_you_mean(str(sample_by), known)
        )
    rows = _load("text", files, sample_by=sample_by, encoding="utf-8-sig")
    return [row["text"] for row in rows if row["text"].strip()]


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


class _Splits(Mapping[str, Any]):
    """Data by split, read when it is asked for.

    Args:
        files: the split's name → its files, in the order of their rows.
        kind: the kind of the files.
        options: options for reading.
        also: other names that files go by, such as ``train_sft`` for the one file that is the
            split ``train`` → those files.
    """

    def __init__(
        self,
        files: Mapping[str, Sequence[Path]],
        kind: str,
        options: Options,
        also: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        self._files, self._kind, self._options = files, kind, options
        self._known = {**(also or {}), **files}

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __getitem__(self, name: str) -> Any:
        return read_files(self._known[name], self._kind, self._options)


def _splits_by_name(folder: Path, files: Sequence[Path], kind: str, options: Options) -> _Splits:
    """Splits as far as the names of files say.

    The numbers of a split's pieces (``train-00000-of-00002``, ``train_1``) are no part of its
    name. A name that speaks of ``train``, ``val`` or ``test`` is that split, unless several
    names speak of the same: then each is a split of its own, for they are hardly one.
    """
    named: dict[str, list[Path]] = {}
    also: dict[str, list[Path]] = {}
    for file in files:
        named.setdefault(_split_name(file.relative_to(folder)), []).append(file)
        also.setdefault(file.stem, []).append(file)
    alike: dict[str, list[str]] = {}
    for name in named:
        meant = next((split for key, split in _KEYS if key in name.lower()), name)
        alike.setdefault(meant, []).append(name)
    splits = {
        (meant if len(names) == 1 else name): named[name]
        for meant, names in alike.items()
        for name in names
    }
    return _Splits(splits, kind, options, {**also, **named})


def _split_name(file: Path) -> str:
    """A file's name without the number of a piece, or the name of a folder that is a split.

    >>> [_split_name(Path(one)) for one in ("my-Train_1.txt", "val/a.txt", "notes.txt")]
    ['my-Train', 'validation', 'notes']
    """
    whole = _SHARD.sub("", file.stem)
    if any(key in whole.lower() for key, _ in _KEYS):
        return _NUMBER.sub("", whole) or whole
    folders = (_FOLDERS.get(part.lower()) for part in file.parts[:-1])
    return next((split for split in folders if split), whole)


def read_path(
    path: Path, kind: str | None, options: Options, config: str | None = None
) -> Mapping[str, Any]:
    """Find the splits of a file or folder; each is read when it is asked for.

    A file is the split ``train``. The splits of a folder's files are those of its data set card,
    or else those of the file names.

    Args:
        path: a file or folder.
        kind: one of :data:`KINDS`, or ``None`` to infer it from the suffix.
        options: see :func:`read_files`.
        config: of a folder with a card, the configuration; ``None`` for the default one.

    Raises:
        DatasetError: the path holds no readable file.
    """
    if unknown := sorted(set(options) - _OPTIONS):
        logger.warning(f"Local files are read without the options {', '.join(unknown)}.")
    if path.is_dir():
        return _read_folder(path, kind, options, config)
    kind = kind or kind_of(path)
    if path.suffix.lower() in _PACKED:
        raise DatasetError(f"The file {path} is packed.", "Unpack it, and name what was in it.")
    if kind is None:
        raise DatasetError(
            f"The file {path} has a suffix that says nothing about its kind.",
            f"Name its kind: dataset={' or '.join(map(repr, KINDS))}.",
        )
    return _Splits({"train": [path]}, kind, options)


def _read_folder(
    path: Path, kind: str | None, options: Options, config: str | None
) -> Mapping[str, Any]:
    card = path / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    front, end, _ = text.replace("\r\n", "\n").removeprefix("---").partition("\n---")
    if text.startswith("---") and end and "\nconfigs:" in front:
        loader, splits, own = resolve("llmcompressor.datasets.hub:resolve_card")(path, config)
        if kind in (None, loader):
            return _Splits(splits, loader, {**own, **options})
    files = sorted(file for file in path.iterdir() if file.is_file())
    if not any(map(kind_of, files)):
        files = sorted(file for file in path.rglob("*") if file.is_file())
    present = sorted({found for file in files if (found := kind_of(file))})
    if kind is None and len(present) > 1:
        raise DatasetError(
            f"The folder {path} holds files of several kinds: {', '.join(present)}.",
            f"Name the one to use, for instance dataset={present[0]!r}.",
        )
    kind = kind or next(iter(present), None)
    if kind is None or kind not in present:
        suffixes = KINDS[kind] if kind else [s for several in KINDS.values() for s in several]
        raise DatasetError(
            f"The folder {path} holds no file that can be read.",
            f"Put files there that end in {', '.join(suffixes)}.",
        )
    return _splits_by_name(path, [file for file in files if kind_of(file) == kind], kind, options)
