# SPDX-License-Identifier: Apache-2.0
"""Conversion of rows to samples: preprocessing, tokenization, labels, padding and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmcompressor.datasets.chat import ChatRenderer, NoTokenizerError, fault_of_chat
from llmcompressor.datasets.checks import check_token_ids
from llmcompressor.datasets.encode import Encoder, pad_id_of, padding_side_of
from llmcompressor.datasets.media import check_placeholders, with_media
from llmcompressor.datasets.preparation import Preparation
from llmcompressor.datasets.preprocess import RowPreparer
from llmcompressor.datasets.rows import Row
from llmcompressor.datasets.samples import (
    SEQUENCES,
    Sample,
    add_labels,
    cut,
    from_processor,
    from_tokenized,
    num_tokens,
    pad,
    token_list,
    unbatched,
)
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

__all__ = ["SampleMaker"]


class SampleMaker:
    """Converts rows to samples, and counts those that are empty or too long for the model."""

    def __init__(self, preparation: Preparation) -> None:
        self._it = preparation
        args = preparation.args
        self._rows = RowPreparer(
            function=args.preprocessing_func,
            template=preparation.template,
            text_column=args.text_column,
            remove_columns=args.remove_columns,
            chat=ChatRenderer(preparation.processor),
            main_inputs=preparation.main_inputs,
        )
        self._encoder: Encoder | None = None
        self._read = self._empty = self._long = self._longest = 0
        self._first_empty = ""
        # A user's own collator gets tokenized rows unchanged.
        self._as_given = (
            callable(args.data_collator)
            and not preparation.for_training
            and not args.concatenate_data
        )

    def __call__(self, numbered: Sequence[tuple[int, Row]]) -> list[Sample]:
        """Convert rows to samples; rows without tokens are dropped."""
        self._read += len(numbered)
        made: dict[int, Sample] = {}
        raw: dict[int, Row] = {}
        for index, given in numbered:
            where = self._where(index)
            row = self._rows(given, where)
            if self._is_tokenized(row, where):
                made[index] = self._tokenized(row, where)
            elif not _is_blank(row):
                raw[index] = row
        made.update(self._encoded(raw))
        kept = []
        for index, _ in numbered:
            if index in made and num_tokens(made[index]) != 0:
                check_token_ids(made[index], self._it.vocab_size, self._where(index))
                kept.append(made[index])
            else:
                self._empty += 1
                self._first_empty = self._first_empty or self._said_of_empty(index, made.get(index))
        return kept

    def report(self, samples: int, wanted: int | None, *, packed: bool) -> None:
        """Warn about dropped and long samples, and raise if no sample is left."""
        name = self._it.name
        if not samples and packed and self._read > self._empty:
            raise DatasetError(
                f"{name} has fewer than {self._it.max_length} tokens in all, which is one sample.",
                "Give more data, or a smaller max_seq_length.",
            )
        if not samples:
            problem = f"All {self._read} samples are without tokens" if self._read else "no sample"
            first = f" ({self._first_empty})" if self._first_empty else ""
            raise DatasetError(f"{name} is empty: {problem}{first}.", "Give data that holds text.")
        self._rows.report()
        if self._empty:
            logger.warning(f"{name}: {self._empty} samples without tokens are left out.")
        if self._long:
            logger.warning(self._said_of_long())
        if wanted is not None and samples < wanted:
            logger.warning(f"{name}: {wanted} samples were asked for, there are only {samples}.")

    def _where(self, index: int) -> str:
        return f"{self._it.name}: sample {index}"

    @staticmethod
    def _said_of_empty(index: int, sample: Sample | None) -> str:
        if sample is None:
            return f"sample {index} has a text without a word"
        if not token_list(sample["input_ids"]):
            return f"sample {index} has empty input_ids"
        return f"the attention_mask of sample {index} is 0 everywhere"

    def _is_tokenized(self, row: Row, where: str) -> bool:
        """Return True if a row is tokenized already."""
        inputs = self._it.main_inputs & row.keys()
        given = {name for name in inputs if row[name] is not None}
        if inputs and not given and row.get("text") is None:
            raise DatasetError(
                f"{where} has no value (None) in its column {min(inputs)!r}.",
                "Give the token ids of each sample, or leave such samples out.",
            )
        return bool(given) and ("input_ids" in given or "text" not in row)

    def _tokenized(self, row: Row, where: str) -> Sample:
        if self._as_given:
            return row
        sample = from_tokenized(
            row,
            self._it.model_input_names,
            use_loss_mask=self._it.args.use_loss_mask,
            keep_labels=self._it.for_training,
            where=where,
        )
        if not self._it.for_training:
            return self._within_limit(sample)
        prompt = row.get("prompt")
        ids = self._own_encoder(where).ids(prompt) if isinstance(prompt, str) else None
        sample = self._within_limit(self._as_asked(add_labels(sample, ids)))
        return unbatched(sample) if callable(self._it.args.data_collator) else sample

    def _as_asked(self, sample: Sample) -> Sample:
        """Truncate a training sample to ``max_seq_length``, which training collators do not do."""
        asked = self._it.args.max_seq_length
        if asked is None or self._it.args.concatenate_data:
            return sample
        return _cut_to(sample, asked)

    def _within_limit(self, sample: Sample) -> Sample:
        """Truncate a tokenized sample to the model's table of positions, and count long samples."""
        limit = self._it.model_max_length
        if limit is None or self._it.args.concatenate_data:
            return sample
        length = len(sample.get("input_ids", ()))
        if self._cuts and self._it.args.max_seq_length is not None:
            length = min(length, self._it.args.max_seq_length)
        if length <= limit:
            return sample
        self._long, self._longest = self._long + 1, max(self._longest, length)
        if not self._it.in_table:
            return sample
        return _cut_to(sample, limit)

    def _said_of_long(self) -> str:
        limit = self._it.model_max_length
        said = (
            f"{self._it.name}: {self._long} samples that came tokenized have up to "
            f"{self._longest} tokens, and the model takes {limit}"
        )
        if self._it.in_table:
            return f"{said}: they are cut to {limit}."
        remedy = f" max_seq_length={limit} cuts them." if self._cuts else ""
        return f"{said}: they are used as they are.{remedy}"

    @property
    def _cuts(self) -> bool:
        """True if samples are truncated to ``max_seq_length``, here or by the collator."""
        return self._it.for_training or self._it.args.data_collator == "truncation"

    def _encoded(self, rows: Mapping[int, Row]) -> dict[int, Sample]:
        """Run rows of text, images or audio through the processor."""
        if not rows:
            return {}
        encoder = self._own_encoder(self._where(next(iter(rows))))
        known = encoder.columns
        rows = {index: _with_media(row, known, self._where(index)) for index, row in rows.items()}
        for index, row in rows.items():
            where = self._where(index)
            self._rows.check_columns(row, known, where)
            _check_text(row, where)
            _check_media(row, self._it.processor, known, where)
        try:
            outputs = encoder(list(rows.values()))
        except DatasetError:
            raise
        except Exception as error:
            first = self._where(next(iter(rows)))
            raise DatasetError(
                f"{first} (or one of the {len(rows) - 1} after it) is refused by the "
                f"processor: {error!r}.",
                "Check the data, or prepare it in a preprocessing_func.",
            ) from error
        return {
            index: self._finished(output, rows[index], encoder, self._where(index))
            for index, output in zip(rows, outputs, strict=True)
        }

    def _finished(
        self, outputs: Mapping[str, Any], row: Row, encoder: Encoder, where: str
    ) -> Sample:
        it = self._it
        sample = from_processor(
            outputs, it.model_input_names, keep_labels=it.for_training, where=where
        )
        if it.for_training:
            prompt = row.get("prompt")
            sample = add_labels(sample, encoder.ids(prompt) if isinstance(prompt, str) else None)
        if it.args.pad_to_max_length and not it.args.concatenate_data:
            sample = self._padded(sample)
        return unbatched(sample) if callable(it.args.data_collator) else sample

    def _padded(self, sample: Sample) -> Sample:
        length = self._it.max_length
        if length is None:
            raise DatasetError(
                "The length to pad to is not known: the tokenizer has no limit.",
                "Give max_seq_length.",
            )
        pad_id = pad_id_of(self._it.processor, self._it.vocab_size)
        side = padding_side_of(self._it.processor)
        return {
            name: pad(sample, name, length, pad_id=pad_id, side=side)
            if name in SEQUENCES and isinstance(value, list)
            else value
            for name, value in sample.items()
        }

    def _own_encoder(self, where: str) -> Encoder:
        if self._encoder is None:
            if self._it.processor is None:
                raise NoTokenizerError(
                    f"{where} is not tokenized, and there is no tokenizer.",
                    "Give the model's tokenizer, or data with input_ids.",
                )
            self._encoder = Encoder(
                self._it.processor,
                max_length=self._it.max_length,
                cut_media=self._it.args.max_seq_length is not None,
            )
        return self._encoder


def _cut_to(sample: Sample, length: int) -> Sample:
    """Truncate each sequence of a sample to ``length`` tokens."""
    return {
        name: cut(sample, name, length) if name in SEQUENCES and isinstance(value, list) else value
        for name, value in sample.items()
    }


def _is_blank(row: Row) -> bool:
    """Return True if a row has nothing but a blank text."""
    if "text" not in row:
        return False
    text = row["text"]
    media = any(name in row for name in ("images", "image", "audio", "videos", "video"))
    return not media and (text is None or (isinstance(text, str) and not text.strip()))


def _check_text(row: Row, where: str) -> None:
    text = row.get("text")
    if text is not None and not isinstance(text, str):
        turns = isinstance(text, list) and any(isinstance(one, Mapping) for one in text)
        fault = f": {fault_of_chat(text)}" if turns else ""
        raise DatasetError(
            f"{where} has a {type(text).__name__} for its text{fault}.",
            "Make a string of it with a preprocessing_func, or name another text_column.",
        )
    if text is not None and not text.isascii():
        _check_unicode(text, where)


def _with_media(row: Row, known: frozenset[str], where: str) -> Row:
    try:
        return with_media(row, known)
    except DatasetError as error:
        raise DatasetError(f"{where}: {error.problem}", error.remedy) from error


def _check_media(row: Row, processor: Any, known: frozenset[str], where: str) -> None:
    try:
        check_placeholders(processor, row, known)
    except DatasetError as error:
        raise DatasetError(f"{where}: {error.problem}", error.remedy) from error


def _check_unicode(text: str, where: str) -> None:
    """Refuse lone surrogates, which Python strings allow but tokenizers do not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DatasetError(
            f"{where} has {text[error.start]!r} in its text, at {error.start}: it is no character "
            "by itself.",
            "Read the text with errors='replace', or clean it in a preprocessing_func.",
        ) from error
