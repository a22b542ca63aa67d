# SPDX-License-Identifier: Apache-2.0
"""A file of JSON as rows: a document, or a value on each line."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcompressor.datasets.chat import is_chat
from llmcompressor.datasets.rows import Columns, Items, Row, Rows, as_row
from llmcompressor.errors import DatasetError, did_you_mean

__all__ = ["holds_columns", "read_json"]

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
