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

from llmcompressor.datasets.rows import Items, Row, Rows, as_row
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.registry import resolve

__all__ = ["KINDS", "kind_of", "read_file"]

KINDS: Mapping[str, tuple[str, ...]] = {
    "csv": (".csv", ".tsv"),
    "json": (".json", ".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt",),
}
"""Kinds of file → the suffixes they go by."""

_OF_LINES = frozenset({".jsonl", ".ndjson"})
_LONGEST_CELL = 1 << 30
_csv_limit = threading.Lock()


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
    read = {"json": _read_json, "csv": _read_csv, "parquet": _read_parquet, "text": _read_text}
    try:
        return read[kind](path, options)
    except DatasetError:
        raise
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's and json's are ValueErrors
        raise DatasetError(
            f"The file {path} cannot be read as {kind}: {error}.",
            "Check the file, or name its kind with dataset=.",
        ) from error


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
            return as_row(json.loads(line), index)
        except ValueError as error:
            raise DatasetError(
                f"Row {index} of {self._path} is not JSON: {error}.",
                "Each line must hold one JSON object.",
            ) from error


def _read_json(path: Path, options: Mapping[str, Any]) -> Rows:
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
    return Items(_rows_of_json(value))


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
        return not is_alone or _only_list(value) is None
    if isinstance(value, list):
        return bool(value) and all(isinstance(token, int) for token in value)
    return True


def _only_list(value: Mapping[str, Any]) -> list[Any] | None:
    """The rows of ``{"data": [{...}, ...]}``: one key, and rows (not a chat's turns) under it."""
    if len(value) != 1:
        return None
    (inner,) = value.values()
    if not isinstance(inner, list) or not inner or not all(isinstance(r, dict) for r in inner):
        return None
    return None if {"role", "from"} & inner[0].keys() else inner


def _rows_of_json(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        return _only_list(value) or [value]
    raise ValueError("it holds neither a list nor an object")


@contextmanager
def _long_cells() -> Iterator[None]:
    """Allow cells of any length; the limit belongs to the process, so it is put back."""
    with _csv_limit:
        before = csv.field_size_limit(_LONGEST_CELL)
        try:
            yield
        finally:
            csv.field_size_limit(before)


def _read_csv(path: Path, options: Mapping[str, Any]) -> Rows:
    delimiter = options.get("delimiter") or ("\t" if path.suffix.lower() == ".tsv" else ",")
    with _long_cells(), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        header = next(reader, [])
        cells = [cell for cell in reader if cell]
    for number, row in enumerate(cells):
        if len(row) != len(header):
            raise DatasetError(
                f"Row {number} of {path} has {len(row)} cells, the header has {len(header)}.",
                "Quote cells that contain the delimiter.",
            )
    return _Table(header, cells)


class _Table:
    """Rows of a header and cells, made into dicts when they are asked for."""

    def __init__(self, header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        self._header, self._cells = header, cells

    def __len__(self) -> int:
        return len(self._cells)

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        return [dict(zip(self._header, self._cells[index], strict=True)) for index in indices]


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
