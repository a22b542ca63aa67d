# SPDX-License-Identifier: Apache-2.0
"""Evaluation text: a user's source converted to documents of token ids."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import Source, open_source
from llmcompressor.datasets import rows as table
from llmcompressor.datasets.files import KINDS, kind_of
from llmcompressor.datasets.rows import Rows
from llmcompressor.datasets.samples import errors_naming, from_tokenized
from llmcompressor.datasets.stdlib_text import held_out_texts
from llmcompressor.datasets.text import (
    ChatRenderer,
    NoTokenizerError,
    RowPreparer,
    refuse_broken_chat,
)
from llmcompressor.datasets.tokenize import automatic_bos, tokenizer_of
from llmcompressor.errors import ArgumentError, DatasetError, did_you_mean

# --------------------
# Windows of token ids cut from a text, and padded batches of them.

Window = list[int]


def tokenize(texts: Iterable[str], tokenizer: Any) -> Iterator[Window]:
    """The token ids of each text, with the special tokens that the tokenizer adds."""
    for text in texts:
        yield list(tokenizer(text, verbose=False)["input_ids"])


def cut_windows(documents: Iterable[Sequence[int]], length: int) -> list[Window]:
    """Concatenate the documents and cut them into windows of ``length`` that do not overlap.

    The rest is a shorter window, if it is long enough to predict a token.

    >>> cut_windows([[1, 2, 3], [4, 5, 6, 7, 8]], 3)
    [[1, 2, 3], [4, 5, 6], [7, 8]]
    """
    if length < 2:
        raise ArgumentError(
            f"max_seq_length is {length}: a window needs two tokens to predict one.",
            "Give 2 or more.",
        )
    stream = [token for document in documents for token in document]
    pieces = (stream[start : start + length] for start in range(0, len(stream), length))
    return [piece for piece in pieces if len(piece) > 1]


def sample_windows(windows: Sequence[Window], count: int | None, seed: int) -> list[Window]:
    """Draw ``count`` of the windows by ``seed``, in their order; all for ``None``.

    >>> sample_windows([[0, 1], [2, 3], [4, 5]], 2, seed=0)
    [[2, 3], [4, 5]]
    """
    if count is not None and count < 1:
        raise ArgumentError(f"num_samples is {count}.", "Give 1 or more, or None for all.")
    if count is None or count >= len(windows):
        return list(windows)
    kept = random.Random(seed).sample(range(len(windows)), count)
    return [windows[index] for index in sorted(kept)]


def padded_batches(windows: Sequence[Window], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ``size`` windows, padded on the right.

    Yields:
        ``ids_BT`` long and ``mask_BT`` bool, true where a real token is. The padding
        is token 0: a valid index, and never counted.
    """
    for start in range(0, len(windows), size):
        chunk = [torch.tensor(window, dtype=torch.long) for window in windows[start : start + size]]
        ids_BT = torch.nn.utils.rnn.pad_sequence(chunk, batch_first=True, padding_value=0)
        lengths_B = torch.tensor([len(window) for window in chunk])
        yield ids_BT, torch.arange(ids_BT.shape[1]) < lengths_B[:, None]


_ROWS_AT_A_TIME = 64


def tokenized_documents(
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
            text file, which is one document, line breaks and all; or whatever ``oneshot`` takes
            as its data set, whose rows are read as ``oneshot`` reads them.
        tokenizer: not needed for rows with ``input_ids``.
        text_column: the column with the text.
        config_name: configuration of a named dataset.
        split: the split; by default the only one, or ``train``.

    Raises:
        DatasetError: there is nothing of the kind, a file is neither rows nor text, or the rows
            have no usable column.
        ArgumentError: a configuration or split is named of what has none.
    """
    if source is None:
        _refuse_config_and_split("The text that comes with Python", config_name, split)
        return _tokenize_rows([{"text": text} for text in held_out_texts()], tokenizer)
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.is_file() and kind_of(path) in (None, "text"):
            _refuse_config_and_split(f"The file {path} is one text, which", config_name, split)
            return _tokenize_rows([{"text": _read_text(path)}], tokenizer)
        if path.exists():
            _refuse_config_and_split(f"The data {path}", config_name, None)
        source = str(source)
        if getattr(table.find(source), "is_mix", False):
            raise ArgumentError(
                f"dataset={source!r} is a mix to calibrate with, which has no end.",
                "Leave dataset out for modules of the standard library that are kept for this, or "
                "name a text that the model was not calibrated with.",
            )
    args = DatasetArguments(
        dataset=source, dataset_config_name=config_name, splits=split, text_column=text_column
    )
    return documents_of_rows(args, tokenizer)


def documents_of_rows(args: DatasetArguments, tokenizer: Any) -> Iterator[Window]:
    """The documents of the rows that the arguments name, as :func:`tokenized_documents`.

    Raises:
        ArgumentError: they are a DataLoader's batches.
    """
    opened = open_source(args, role="evaluation")
    if opened is None:
        raise ArgumentError(
            "The argument dataset is a DataLoader, whose batches cannot be cut into windows.",
            "Give the data set itself.",
        )
    return _tokenize_rows(_rows_with_text(opened, args, tokenizer), tokenizer)


def _refuse_config_and_split(what: str, config_name: str | None, split: str | None) -> None:
    """Raise if a configuration or split is named of a source that has none."""
    given = {"dataset_config_name": config_name, "split": split}
    for name, kind in (("dataset_config_name", "configurations"), ("split", "splits")):
        if given[name] is not None:
            raise ArgumentError(
                f"{what} has no {kind}: {name}={given[name]!r}.", f"Leave {name} out."
            )


def _read_text(path: Path) -> str:
    """Read a file as one text; raise for binary formats."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        problem = "it holds a zero byte" if "\0" in text else ""
    except UnicodeDecodeError as error:
        problem = f"it is not UTF-8 ({error.reason} at byte {error.start})"
    except OSError as error:
        raise DatasetError(f"The file {path} cannot be read: {error}.", "Check it.") from error
    if problem:
        suffixes = (one for kind, several in KINDS.items() if kind != "text" for one in several)
        raise DatasetError(
            f"The file {path} is no text: {problem}.",
            f"Give a text in UTF-8, or rows ({', '.join(suffixes)}).",
        )
    return text


def _rows_with_text(
    opened: Source, args: DatasetArguments, tokenizer: Any
) -> Iterator[Mapping[str, Any]]:
    """The rows with their ``text``: from a template, a rendered chat, or a named column."""
    template = None
    if opened.owner is not None:
        owner = opened.owner(dataset_args=args, split=args.splits, processor=tokenizer)
        template = owner.dataset_template
    prepare = RowPreparer(
        function=args.preprocessing_func,
        template=template,
        text_column=args.text_column,
        remove_columns=None,
        chat=ChatRenderer(tokenizer),
    )
    rows: Any = opened.rows
    if isinstance(rows, Rows):
        chunk, sized = _ROWS_AT_A_TIME, rows
        starts = range(0, len(sized), chunk)
        parts = (sized.cut(start, start + chunk) for start in starts)
        rows = (row for part in parts for row in part.fetch(range(len(part))))
    for index, row in enumerate(rows):
        with errors_naming(f"{opened.name}: sample {index}"):
            prepared = prepare(row)
        yield prepared


def _tokenize_rows(rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> Iterator[Window]:
    bos = automatic_bos(tokenizer_of(tokenizer))
    for index, row in enumerate(rows):
        text = ""
        with errors_naming(f"The data: sample {index}"):
            if row.get("input_ids") is not None:
                given = {name: row.get(name) for name in ("input_ids", "attention_mask")}
                sample = from_tokenized(given, (), use_loss_mask=False, keep_labels=False)
            else:
                sample, text = {}, _text(row)
        if sample:
            pairs = zip(sample["input_ids"], sample["attention_mask"], strict=True)
            yield [token for token, real in pairs if real]
        elif tokenizer is None:
            raise NoTokenizerError(
                "The data holds text, and the model came without its tokenizer.",
                "Pass `tokenizer`, or rows with `input_ids`.",
            )
        else:
            # Rendered chats already begin with the BOS token that the tokenizer adds.
            yield from tokenize([text.removeprefix(bos)], tokenizer)


def _text(row: Mapping[str, Any]) -> str:
    if isinstance(row.get("text"), str):
        return str(row["text"])
    refuse_broken_chat(row)
    texts = [name for name, value in row.items() if isinstance(value, str)]
    raise DatasetError(
        "The data has no text column 'text' and no `input_ids`; "
        f"its columns are {', '.join(sorted(row))}.",
        f"Name the column with `text_column`. {did_you_mean('text', texts)}".rstrip(),
    )
