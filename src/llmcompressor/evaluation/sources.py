# SPDX-License-Identifier: Apache-2.0
"""What a user names as the text to evaluate on → documents of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import Source, open_source
from llmcompressor.errors import ArgumentError, DatasetError, did_you_mean
from llmcompressor.evaluation.stdlib_text import held_out_texts
from llmcompressor.evaluation.windows import Window, tokenize

__all__ = ["documents_of"]

_ROWS_AT_A_TIME = 64
# Files of rows; any other file is one text, line breaks and all.
_FILES_OF_ROWS = frozenset({".csv", ".json", ".jsonl", ".parquet"})


def documents_of(
    source: Any,
    tokenizer: Any,
    *,
    text_column: str = "text",
    config_name: str | None = None,
    split: str | None = None,
) -> Iterator[Window]:
    """The documents of ``source`` as token ids.

    Args:
        source: ``None`` for the held-out modules of the running Python's standard library; a
            text file, which is one document; or whatever ``oneshot`` takes as its data set.
        tokenizer: not needed for rows with ``input_ids``.
        text_column: the column with the text.
        config_name: configuration of a named dataset.
        split: which split; the only one, or ``train``, by default.

    Raises:
        DatasetError: there is nothing of the kind, or its rows have no usable column.
    """
    if source is None:
        return _tokens([{"text": text} for text in held_out_texts()], tokenizer, "text")
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.is_file() and path.suffix.lower() not in _FILES_OF_ROWS:
            text = path.read_text(encoding="utf-8-sig", errors="replace")
            return _tokens([{"text": text}], tokenizer, "text")
        source = str(source)
    args = DatasetArguments(
        dataset=source, dataset_config_name=config_name, splits=split, text_column=text_column
    )
    opened = open_source(args, role="evaluation")
    if opened is None:
        raise ArgumentError(
            "The argument dataset is a DataLoader, whose batches cannot be cut into windows.",
            "Give the data set itself.",
        )
    column = text_column if opened.owner is None else "text"  # which its template makes
    return _tokens(_templated(opened, args, tokenizer), tokenizer, column)


def _templated(
    opened: Source, args: DatasetArguments, tokenizer: Any
) -> Iterator[Mapping[str, Any]]:
    """The rows, in the words of their data set's own template if it has one."""
    if opened.owner is None:
        return _rows(opened)
    owner = opened.owner(dataset_args=args, split=args.splits, processor=tokenizer)
    return ({**row, **owner.dataset_template(row)} for row in _rows(opened))


def _rows(opened: Source) -> Iterator[Mapping[str, Any]]:
    rows: Any = opened.rows
    if not hasattr(rows, "fetch"):
        yield from rows
        return
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        yield from rows.fetch(range(start, min(start + _ROWS_AT_A_TIME, len(rows))))


def _tokens(
    rows: Iterable[Mapping[str, Any]], tokenizer: Any, text_column: str
) -> Iterator[Window]:
    for row in rows:
        if "input_ids" in row:
            yield _real_tokens(row)
        elif tokenizer is None:
            raise DatasetError(
                "The data holds text, and the model came without its tokenizer.",
                "Pass `tokenizer`, or rows with `input_ids`.",
            )
        else:
            yield from tokenize([_text(row, text_column)], tokenizer)


def _real_tokens(row: Mapping[str, Any]) -> Window:
    """Token ids of a row without its padding."""
    ids = [int(token) for token in row["input_ids"]]
    mask = row.get("attention_mask")
    if mask is None:
        return ids
    return [token for token, real in zip(ids, mask, strict=True) if real]


def _text(row: Mapping[str, Any], column: str) -> str:
    if isinstance(row.get(column), str):
        return str(row[column])
    texts = [name for name, value in row.items() if isinstance(value, str)]
    raise DatasetError(
        f"The data has no text column {column!r} and no `input_ids`; "
        f"its columns are {', '.join(sorted(row))}.",
        f"Name the column with `text_column`. {did_you_mean(column, texts)}".rstrip(),
    )
