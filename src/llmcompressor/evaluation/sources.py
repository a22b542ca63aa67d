# SPDX-License-Identifier: Apache-2.0
"""What a user names as the text to evaluate on → documents of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from llmcompressor.errors import DatasetError
from llmcompressor.evaluation.stdlib_text import held_out_texts
from llmcompressor.evaluation.windows import Window, tokenize

__all__ = ["documents_of"]

# Files that `datasets` parses; any other file is one text.
_LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_EVALUATION_SPLITS = ("test", "validation", "train")


def documents_of(
    source: Any,
    tokenizer: Any,
    *,
    text_column: str = "text",
    config_name: str | None = None,
    split: str | None = None,
) -> Iterable[Window]:
    """The documents of ``source`` as token ids.

    Args:
        source: ``None`` for the held-out modules of the running Python's standard library; a
            text file; a json, jsonl, csv or parquet file; a folder written by
            ``Dataset.save_to_disk``; the name of a dataset; strings; a ``Dataset`` or
            ``DatasetDict``; rows with ``input_ids`` or with ``text_column``.
        tokenizer: not needed for rows with ``input_ids``.
        text_column: the column with the text.
        config_name: configuration of a named dataset.
        split: which split; ``test``, else ``validation``, else ``train`` by default.

    Raises:
        DatasetError: there is nothing of the kind, or its rows have no usable column.
    """
    rows = _rows(source, config_name, split)
    first = next(iter(rows), None)
    if first is None:
        raise DatasetError("The dataset to evaluate on is empty.", "Give one with rows.")
    if isinstance(first, Mapping) and "input_ids" in first:
        return (_real_tokens(row) for row in rows)
    if tokenizer is None:
        raise DatasetError(
            "The dataset holds text, and the model came without its tokenizer.",
            "Pass `tokenizer`, or rows with `input_ids`.",
        )
    return tokenize((_text(row, text_column) for row in rows), tokenizer)


def _rows(source: Any, config_name: str | None, split: str | None) -> Any:
    if source is None:
        return held_out_texts()
    if isinstance(source, str | Path):
        source = _named(source, config_name, split)
    if isinstance(source, Mapping):
        return _one_split(source, split)
    if isinstance(source, Iterable):
        return source if isinstance(source, Sequence | datasets.Dataset) else list(source)
    raise DatasetError(
        f"A {type(source).__name__} is no dataset.",
        "Give a text file, a dataset or its name, or a list of strings.",
    )


def _named(source: str | Path, config_name: str | None, split: str | None) -> Any:
    path = Path(source).expanduser()
    if path.is_file():
        loader = _LOADERS.get(path.suffix.lower())
        if loader is None:
            return [path.read_text(encoding="utf-8", errors="replace")]
        return datasets.load_dataset(loader, data_files=str(path))
    try:
        if path.is_dir() and not any(path.glob("*.parquet")):
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(str(source), config_name, split=split)
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"There is no dataset {str(source)!r} to evaluate on: {error}",
            "Give a text file, a folder written by `save_to_disk`, or the name of a dataset.",
        ) from error


def _one_split(splits: Mapping[str, Any], split: str | None) -> Any:
    for name in (split,) if split else _EVALUATION_SPLITS:
        if name in splits:
            return splits[name]
    raise DatasetError(
        f"The dataset has no split {split or _EVALUATION_SPLITS[0]!r}.",
        f"Choose one of: {', '.join(sorted(splits))}.",
    )


def _real_tokens(row: Mapping[str, Any]) -> Window:
    """Token ids of a row without its padding."""
    ids = list(row["input_ids"])
    mask = row.get("attention_mask")
    if mask is None:
        return [int(token) for token in ids]
    return [int(token) for token, real in zip(ids, mask, strict=True) if real]


def _text(row: Any, column: str) -> str:
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping) and isinstance(row.get(column), str):
        text: str = row[column]
        return text
    having = f"columns {', '.join(sorted(row))}" if isinstance(row, Mapping) else repr(row)[:60]
    raise DatasetError(
        f"The dataset has no text column {column!r} and no `input_ids`; it has {having}.",
        "Name the column with `text_column`.",
    )
