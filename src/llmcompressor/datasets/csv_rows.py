# SPDX-License-Identifier: Apache-2.0
"""A CSV file as rows."""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmcompressor.datasets.rows import Row, Rows
from llmcompressor.errors import DatasetError

__all__ = ["read_csv"]

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
