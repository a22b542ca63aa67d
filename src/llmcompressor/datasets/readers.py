# SPDX-License-Identifier: Apache-2.0
"""Local files as rows: JSON, JSON lines, CSV, Parquet and plain text.

The files are read here, and not through a data set library, so that nothing is cached in the
user's home, and a file of JSON lines of any size costs only an index of its lines.
"""

from __future__ import annotations

import csv
import json
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from llmcompressor.datasets.preprocess import is_chat
from llmcompressor.datasets.rows import Columns, Items, Row, Rows, as_row
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.runtime.registry import resolve

__all__ = ["KINDS", "holds_columns", "kind_of", "read_csv", "read_file", "read_json"]


# --------------------
# A file of JSON as rows: a document, or a value on each line.

_OF_LINES = frozenset({".jsonl", ".ndjson"})


class _Lines:
    """Rows of a file with one JSON value to a line; only the lines' places are kept."""

    def __init__(self, path: Path) -> None:
        self._path, self._places = path, array("Q")
        place = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._places.append(place)
                place += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        """The rows of the lines at ``indices``; blank lines are not counted."""
        rows = []
        with self._path.open("rb") as file:
            for index in indices:
                file.seek(self._places[index])
                rows.append(self._parse(file.readline(), index))
        return rows

    def _parse(self, line: bytes, index: int) -> Row:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DatasetError(
                f"Row {index} of {self._path} is not JSON: {error}.",
                "Each line must hold one JSON object.",
            ) from error
        return as_row(value, index)


def read_json(path: Path, options: Mapping[str, Any]) -> Rows:
    """The rows of a document, or of a file with one to a line.

    Args:
        path: the file.
        options: ``field``: the key of a document that the rows are under.

    Raises:
        DatasetError: for a key that is not there, and for a document that holds no rows.
        ValueError: for what is not JSON.
    """
    field = options.get("field")
    if field is None and _has_json_lines(path):
        return _Lines(path)
    with path.open(encoding="utf-8-sig") as file:
        value = json.load(file)
    if field is not None:
        if not isinstance(value, dict) or field not in value:
            raise DatasetError(
                f"The file {path} has no key {field!r}.",
                did_you_mean(field, value if isinstance(value, dict) else []),
            )
        value = value[field]
    return _rows_of_document(value, path)


def _has_json_lines(path: Path) -> bool:
    """Whether the first line with anything on it is a row of its own.

    ``{"data": [{...}, ...]}`` on a line is one where the file's name says so, and where there are
    more lines: no JSON document goes on behind its last brace.
    """
    with path.open("rb") as file:
        written = (line for line in file if line.strip())
        first, second = next(written, b""), next(written, None)
    try:
        value = json.loads(first)
    except ValueError:
        return not first  # an empty file has no lines
    if isinstance(value, dict):
        is_alone = second is None and path.suffix.lower() not in _OF_LINES
        return not is_alone or not _is_document(value)
    if isinstance(value, list):
        return bool(value) and all(isinstance(token, int) for token in value)
    return True


def _only_list(value: Mapping[str, Any]) -> list[Any] | None:
    """The rows of ``{"data": [{...}, ...]}``: one key, and rows (not a chat's turns) under it."""
    inner = next(iter(value.values()), None)
    return inner if len(value) == 1 and _is_rows(inner) else None


def _is_rows(value: Any) -> bool:
    """Whether it is a list of objects that are not the turns of a chat."""
    if not isinstance(value, list) or not value or not all(isinstance(r, dict) for r in value):
        return False
    return not {"role", "from"} & value[0].keys()


def holds_columns(value: Mapping[str, Any]) -> bool:
    """Whether each key has a list of values, one for each row, and not what one row has there.

    >>> holds_columns({"text": ["a", "b"]}), holds_columns({"input_ids": [5, 6]})
    (True, False)
    """
    if not value or not all(isinstance(each, list) for each in value.values()):
        return False
    ids = value.get("input_ids")
    of_one_row = any(is_chat(each) or _is_rows(each) for each in value.values())
    return not of_one_row and not (ids and isinstance(ids[0], int))


def _holds_row_lists(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(_is_rows(each) for each in value.values())


def _is_document(value: Mapping[str, Any]) -> bool:
    """Whether it holds several rows."""
    return holds_columns(value) or _holds_row_lists(value)


def _rows_of_document(value: Any, path: Path) -> Rows:
    if isinstance(value, list):
        return Items(value)
    if not isinstance(value, dict):
        raise ValueError("it holds neither a list nor an object")
    if holds_columns(value):
        return Columns(value)
    if len(value) > 1 and _holds_row_lists(value):
        raise DatasetError(
            f"The file {path} has rows under several keys: {', '.join(value)}.",
            f"Name one, as in raw_kwargs={{'field': {min(value)!r}}}.",
        )
    return Items(_only_list(value) or [value])


# --------------------
# A CSV file as rows.

_LONGEST_CELL = 1 << 30
_csv_limit = threading.Lock()
_DELIMITERS = (";", "\t", "|", ",")
"""What other programs put between cells."""


def read_csv(path: Path, options: Mapping[str, Any]) -> Rows:
    """The rows below the header.

    Args:
        path: the file.
        options: ``delimiter``; if not given a tab in a ``.tsv``, else a comma.

    Raises:
        DatasetError: for a row of another length than the header, for a column that comes twice,
            and for a file that another delimiter fits.
    """
    given = options.get("delimiter")
    if given is not None and not (isinstance(given, str) and len(given) == 1):
        raise DatasetError(
            f"The option 'delimiter' cannot be {given!r}.",
            "Give one character, as in raw_kwargs={'delimiter': ';'}.",
        )
    delimiter = given or ("\t" if path.suffix.lower() == ".tsv" else ",")
    header, cells = _cells(path, delimiter)
    if given is None:
        _check_delimiter(path, header, delimiter)
    for number, row in enumerate(cells):
        if len(row) != len(header):
            raise DatasetError(
                f"Row {number} of {path} has {len(row)} cells, the header has {len(header)}.",
                "Quote cells that contain the delimiter.",
            )
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        raise DatasetError(
            f"The header of {path} names the column {twice!r} more than once.",
            "Give each column a name of its own.",
        )
    return _Table(header, cells)


def _cells(path: Path, delimiter: str) -> tuple[list[str], list[list[str]]]:
    """The header, and the rows below it that are not blank."""
    with _long_cells(), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        header = next(reader, [])
        return header, [cell for cell in reader if cell]


def _check_delimiter(path: Path, header: Sequence[str], delimiter: str) -> None:
    """Refuse a file of one column that is one of several with another delimiter, in every row."""
    if len(header) != 1:
        return
    for other in _DELIMITERS:
        if other == delimiter or other not in header[0]:
            continue
        names, cells = _cells(path, other)
        if all(len(row) == len(names) for row in cells):
            raise DatasetError(
                f"The file {path} is read with {delimiter!r} between its cells, and it seems to "
                f"have {other!r}: its header is {header[0]!r}.",
                f"Give raw_kwargs={{'delimiter': {other!r}}} (--raw-kwargs 'delimiter={other}'), "
                f"or {delimiter!r} there if it is meant so.",
            )


@contextmanager
def _long_cells() -> Iterator[None]:
    """Allow cells of any length; the limit belongs to the process, so it is put back."""
    with _csv_limit:
        before = csv.field_size_limit(_LONGEST_CELL)
        try:
            yield
        finally:
            csv.field_size_limit(before)


class _Table:
    """Rows of a header and cells, made into dicts when they are asked for."""

    def __init__(self, header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        self._header, self._cells = header, cells

    def __len__(self) -> int:
        return len(self._cells)

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        return [dict(zip(self._header, self._cells[index], strict=True)) for index in indices]


# --------------------
# Local files as rows: JSON, JSON lines, CSV, Parquet and plain text.

KINDS: Mapping[str, tuple[str, ...]] = {
    "csv": (".csv", ".tsv"),
    "json": (".json", ".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt",),
}
"""Kinds of file → the suffixes they go by."""


def kind_of(path: Path) -> str | None:
    """The kind of a file by its suffix, or ``None`` for a suffix of no kind."""
    suffix = path.suffix.lower()
    return next((kind for kind, suffixes in KINDS.items() if suffix in suffixes), None)


def read_file(path: Path, kind: str, options: Mapping[str, Any]) -> Rows:
    """The rows of one file.

    Args:
        path: the file.
        kind: one of :data:`KINDS`.
        options: ``field`` (JSON: the key the rows are under), ``delimiter`` (CSV) and
            ``sample_by`` (text: "line", "paragraph" or "document").

    Raises:
        DatasetError: for a file that cannot be read as that kind.
    """
    read = {"json": read_json, "csv": read_csv, "parquet": _read_parquet, "text": _read_text}
    try:
        return read[kind](path, options)
    except DatasetError:
        raise
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"The file {path} cannot be read as {kind}: it is not UTF-8 ({error}).",
            "Save it as UTF-8, or name its kind with dataset= if it is none.",
        ) from error
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's and json's are ValueErrors
        raise DatasetError(
            f"The file {path} cannot be read as {kind}: {error}.",
            "Check the file, or name its kind with dataset=.",
        ) from error


class _Arrow:
    """Rows of an Arrow table."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        rows: list[Row] = self._table.take(list(indices)).to_pylist()
        return rows


def _read_parquet(path: Path, options: Mapping[str, Any]) -> Rows:
    del options
    table = resolve("pyarrow.parquet:read_table")(path, memory_map=True)
    if b"huggingface" in (table.schema.metadata or {}):  # it says which columns are images, audio
        return cast("Rows", resolve("llmcompressor.datasets.hub:rows_of_table")(table))
    return _Arrow(table)


def _read_text(path: Path, options: Mapping[str, Any]) -> Rows:
    sample_by = options.get("sample_by", "line")
    text = path.read_text(encoding="utf-8-sig")
    if sample_by == "document":
        return Items([text] if text.strip() else [])
    separators = {"line": "\n", "paragraph": "\n\n"}
    if sample_by not in separators:
        raise DatasetError(
            f"Text cannot be sampled by {sample_by!r}.",
            did_you_mean(str(sample_by), [*separators, "document"]),
        )
    return Items([part for part in text.split(separators[sample_by]) if part.strip()])
