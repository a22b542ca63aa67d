# SPDX-License-Identifier: Apache-2.0
"""Local files as rows: JSON, JSON lines, CSV, Parquet and plain text.

The files are read here, and not through a data set library, so that nothing is cached in the
user's home, and a file of JSON lines of any size costs only an index of its lines.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from llmcompressor.datasets.csv_rows import read_csv
from llmcompressor.datasets.json_rows import read_json
from llmcompressor.datasets.rows import Items, Row, Rows
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
