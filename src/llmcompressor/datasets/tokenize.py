# SPDX-License-Identifier: Apache-2.0
"""Conversion of rows to samples: tokenization, labels, padding, checks and packing.

The user's tokenizer or processor is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets.preprocess import (
    ChatRenderer,
    NoTokenizerError,
    RowPreparer,
    check_placeholders,
    errors_naming,
    find_chat_fault,
    parameters_of,
    resolve_media,
)
from llmcompressor.datasets.rows import Row
from llmcompressor.datasets.samples import (
    MAIN_INPUTS,
    Sample,
    add_labels,
    check_token_ids,
    from_processor,
    from_tokenized,
    num_tokens,
    pad,
    token_list,
    token_sequences,
    truncate_all,
    without_batch_axis,
)
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

__all__ = [
    "Encoder",
    "Packer",
    "Preparation",
    "SampleMaker",
    "automatic_bos",
    "pad_id_of",
    "padding_side_of",
    "tokenizer_of",
]

_OPTIONS = frozenset(
    {
        "add_special_tokens",
        "is_split_into_words",
        "kwargs",
        "max_length",
        "pad_to_multiple_of",
        "padding",
        "padding_side",
        "return_attention_mask",
        "return_length",
        "return_offsets_mapping",
        "return_overflowing_tokens",
        "return_special_tokens_mask",
        "return_tensors",
        "return_token_type_ids",
        "self",
        "stride",
        "tokenizer_kwargs",
        "truncation",
        "verbose",
    }
)
"""Parameters of a tokenizer that are not data."""

_MEDIA = frozenset({"audio", "audios", "image", "images", "raw_speech", "video", "videos"})
_UNNAMED = frozenset({"audio", "images", "sampling_rate", "text", "videos"})
"""What a processor takes that names none of its parameters (Whisper's does not)."""


def tokenizer_of(processor: Any) -> Any:
    """Return the tokenizer of a processor; a tokenizer is returned itself."""
    return getattr(processor, "tokenizer", None) or processor


def pad_id_of(processor: Any, vocab_size: int | None) -> int:
    """Return the padding token: the tokenizer's, else its end token, else 0."""
    tokenizer = tokenizer_of(processor)
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int) and (vocab_size is None or token < vocab_size):
            return token
    return 0


def padding_side_of(processor: Any) -> str:
    """Return the tokenizer's padding side, "left" or "right"."""
    return str(getattr(tokenizer_of(processor), "padding_side", None) or "right")


class Encoder:
    """Tokenizes rows of text in batches, and other rows one by one.

    Args:
        processor: a tokenizer, a processor, or any function from ``text=`` to token ids.
        max_length: maximum number of tokens, or ``None``.
        cut_media: also truncate rows with images; truncation within an image is an error.
    """

    def __init__(self, processor: Any, *, max_length: int | None, cut_media: bool) -> None:
        self._processor = processor
        self._max_length = max_length
        self._cut_media = cut_media
        self._names, self._takes_any = parameters_of(processor)
        self._bos = automatic_bos(tokenizer_of(processor))

    @property
    def columns(self) -> frozenset[str]:
        """Columns that the processor accepts."""
        data = self._names - _OPTIONS
        if not data and self._takes_any:
            return _UNNAMED
        if "audio" in data and self._takes_any:
            return data | {"sampling_rate"}
        return data

    def __call__(self, rows: Sequence[Row]) -> list[Mapping[str, Any]]:
        """Tokenize rows and return the outputs of each, without columns that are not accepted."""
        kept = [self._usable(row) for row in rows]
        with _restored_settings(tokenizer_of(self._processor)):
            if _is_tokenizer(self._processor) and all(row.keys() == {"text"} for row in kept):
                return self._texts([row["text"] for row in kept])
            return [self._one(row) for row in kept]

    def ids(self, text: str) -> list[int]:
        """Tokenize a text, truncated like the rows."""
        ids: list[int] = list(self([{"text": text}])[0]["input_ids"])
        return ids

    def _usable(self, row: Row) -> Row:
        columns = self.columns
        kept = {name: value for name, value in row.items() if name in columns and value is not None}
        if isinstance(kept.get("text"), str):
            # Rendered chats begin with the start token, which the tokenizer would add again.
            kept["text"] = kept["text"].removeprefix(self._bos)
        return kept

    def _texts(self, texts: list[str]) -> list[Mapping[str, Any]]:
        outputs = dict(self._processor(texts, **self._length_options()))
        return [{name: values[at] for name, values in outputs.items()} for at in range(len(texts))]

    def _one(self, row: Row) -> Mapping[str, Any]:
        has_media = bool(_MEDIA & row.keys())
        options: dict[str, Any] = {}
        if not has_media or (self._cut_media and "audio" not in row):
            options = self._length_options()
        if has_media and (self._takes_any or "return_tensors" in self._names):
            options["return_tensors"] = "pt"
        outputs: Mapping[str, Any] = self._processor(**row, **options)
        return outputs

    def _length_options(self) -> dict[str, Any]:
        if self._max_length is None:
            return {}
        options = {"truncation": True, "max_length": self._max_length}
        return {
            name: value for name, value in options.items() if self._takes_any or name in self._names
        }


def _is_tokenizer(processor: Any) -> bool:
    """Return True for a tokenizer, which takes a list of texts."""
    return hasattr(processor, "convert_tokens_to_ids")


def automatic_bos(tokenizer: Any) -> str:
    """Return the text of the start token if the tokenizer adds it by itself, else ""."""
    bos, bos_id = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    if not isinstance(bos, str) or bos_id is None or not _is_tokenizer(tokenizer):
        return ""
    return bos if list(tokenizer("")["input_ids"][:1]) == [bos_id] else ""


@contextmanager
def _restored_settings(tokenizer: Any) -> Iterator[None]:
    """Restore the truncation and padding of a fast tokenizer, which it keeps between calls."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    truncation, padding = backend.truncation, backend.padding
    try:
        yield
    finally:
        if truncation is None:
            backend.no_truncation()
        else:
            backend.enable_truncation(**truncation)
        if padding is None:
            backend.no_padding()
        else:
            backend.enable_padding(**padding)


# --------------------
# Settings for the conversion of raw rows to samples.

_NO_LIMIT = 1 << 24
"""Tokenizers without a limit say so with a number beyond any sequence."""


@dataclass(frozen=True)
class Preparation:
    """Settings for the conversion of rows to samples.

    Attributes:
        args: the user's arguments.
        processor: the tokenizer or processor; may be ``None`` for tokenized data.
        name: name of the data in messages.
        template: a registered data set's function from a row to text.
        model_input_names: the inputs that the model takes; empty if unknown.
        main_inputs: names of inputs; a row that has one of them needs no processor.
        vocab_size: rows of the model's embedding; ``None`` if unknown.
        model_max_length: maximum number of tokens of the model; ``None`` if unknown.
        for_training: add labels.
        in_table: the model has a table of ``model_max_length`` positions, and fails beyond.
    """

    args: DatasetArguments
    processor: Any = None
    name: str = "The data"
    template: Callable[[Row], Mapping[str, Any]] | None = None
    model_input_names: Collection[str] = ()
    main_inputs: frozenset[str] = MAIN_INPUTS
    vocab_size: int | None = None
    model_max_length: int | None = None
    for_training: bool = False
    in_table: bool = False

    @property
    def model_limit(self) -> int | None:
        """Maximum number of tokens of the model and the tokenizer; ``None`` if unlimited."""
        tokenizer_limit = getattr(tokenizer_of(self.processor), "model_max_length", None)
        limits = [
            limit
            for limit in (self.model_max_length, tokenizer_limit)
            if isinstance(limit, int) and 0 < limit < _NO_LIMIT
        ]
        return min(limits, default=None)

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a sample, by the user, the model and the tokenizer."""
        limits = (self.model_limit, self.args.max_seq_length)
        return min((limit for limit in limits if limit is not None), default=None)


# --------------------
# Conversion of rows to samples: preprocessing, tokenization, labels, padding and checks.


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
                self._first_empty = self._first_empty or self._describe_empty(
                    index, made.get(index)
                )
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
            logger.warning(self._describe_long())
        if wanted is not None and samples < wanted:
            logger.warning(f"{name}: {wanted} samples were asked for, there are only {samples}.")

    def _where(self, index: int) -> str:
        return f"{self._it.name}: sample {index}"

    @staticmethod
    def _describe_empty(index: int, sample: Sample | None) -> str:
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
        sample = add_labels(sample, ids)
        if self._it.args.max_seq_length is not None and not self._it.args.concatenate_data:
            # collators of training do not
            sample = truncate_all(sample, self._it.args.max_seq_length)
        sample = self._within_limit(sample)
        return without_batch_axis(sample) if callable(self._it.args.data_collator) else sample

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
        return truncate_all(sample, limit) if self._it.in_table else sample

    def _describe_long(self) -> str:
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
        ready: dict[int, Row] = {}
        for index, row in rows.items():
            where = self._where(index)
            with errors_naming(where):
                ready[index] = resolve_media(row, known)
            self._rows.check_columns(ready[index], known, where)
            _check_text(ready[index], where)
            with errors_naming(where):
                check_placeholders(self._it.processor, ready[index], known)
        try:
            outputs = encoder(list(ready.values()))
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
            index: self._finished(output, ready[index], encoder, self._where(index))
            for index, output in zip(ready, outputs, strict=True)
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
        return without_batch_axis(sample) if callable(it.args.data_collator) else sample

    def _padded(self, sample: Sample) -> Sample:
        length = self._it.max_length
        if length is None:
            raise DatasetError(
                "The length to pad to is not known: the tokenizer has no limit.",
                "Give max_seq_length.",
            )
        pad_id = pad_id_of(self._it.processor, self._it.vocab_size)
        side = padding_side_of(self._it.processor)
        padded = {
            name: pad(sample, name, length, pad_id=pad_id, side=side)
            for name in token_sequences([sample])
        }
        return {**sample, **padded}

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


def _is_blank(row: Row) -> bool:
    """Return True if a row has nothing but a blank text."""
    if "text" not in row:
        return False
    text = row["text"]
    media = any(name in row for name in ("images", "image", "audio", "videos", "video"))
    return not media and (text is None or (isinstance(text, str) and not text.strip()))


def _check_text(row: Row, where: str) -> None:
    text: Any = row.get("text")
    if text is not None and not isinstance(text, str):
        turns = isinstance(text, list) and any(isinstance(one, Mapping) for one in text)
        fault = f": {find_chat_fault(text)}" if turns else ""
        raise DatasetError(
            f"{where} has a {type(text).__name__} for its text{fault}.",
            "Make a string of it with a preprocessing_func, or name another text_column.",
        )
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as error:  # a lone surrogate, which tokenizers refuse
        raise DatasetError(
            f"{where} has {error.object[error.start]!r} in its text, at {error.start}: it is no "
            "character by itself.",
            "Read the text with errors='replace', or clean it in a preprocessing_func.",
        ) from error


# --------------------
# Packing of samples into sequences of fixed length.


class Packer:
    """Concatenates samples in order and yields pieces of ``length`` tokens.

    Padding is dropped, and so is an incomplete piece at the end.
    """

    def __init__(self, length: int | None) -> None:
        if length is None:
            raise DatasetError(
                "Data can only be concatenated into pieces of a known length.",
                "Give max_seq_length.",
            )
        self._length = length
        self._held: Sample = {}

    def __call__(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Add samples and yield the pieces that are complete."""
        for sample in samples:
            if not all(isinstance(value, list) for value in sample.values()):
                raise DatasetError(
                    "Only text can be concatenated, and the data holds images or sound.",
                    "Give concatenate_data=False.",
                )
            joined = _without_padding(sample)
            if not self._held:
                self._held = {name: [] for name in joined}
            if self._held.keys() != sample.keys():
                raise DatasetError(
                    f"Samples with {', '.join(sample)} cannot be joined to samples with "
                    f"{', '.join(self._held)}.",
                    "Give all samples the same columns.",
                )
            for name, tokens in joined.items():
                self._held[name] += tokens
            yield from self._complete()

    def _complete(self) -> Iterator[Sample]:
        count = min(map(len, self._held.values())) // self._length
        for start in range(0, count * self._length, self._length):
            yield {
                name: tokens[start : start + self._length] for name, tokens in self._held.items()
            }
        self._held = {name: tokens[count * self._length :] for name, tokens in self._held.items()}


def _without_padding(sample: Sample) -> Sample:
    """Drop the padding of a sample, which could fill whole pieces between texts."""
    mask = sample.get("attention_mask")
    if mask is None or all(mask):
        return sample
    return {
        name: [token for token, real in zip(tokens, mask, strict=True) if real]
        if len(tokens) == len(mask)
        else tokens
        for name, tokens in sample.items()
    }
