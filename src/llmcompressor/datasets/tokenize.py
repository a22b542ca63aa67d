# SPDX-License-Identifier: Apache-2.0
"""Conversion of rows to samples: tokenization, labels, padding, checks and packing.

The user's tokenizer or processor is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets.media import MEDIA, check_placeholders, resolve_media
from llmcompressor.datasets.rows import Row
from llmcompressor.datasets.samples import (
    MAIN_INPUTS,
    Sample,
    add_labels,
    check_token_ids,
    errors_naming,
    from_processor,
    from_tokenized,
    num_tokens,
    pad,
    token_sequences,
    truncate_all,
    without_batch_axis,
)
from llmcompressor.datasets.series import cut_series
from llmcompressor.datasets.source import Source, split_for
from llmcompressor.datasets.text import (
    ChatRenderer,
    NoTokenizerError,
    RowPreparer,
    find_chat_fault,
    parameters_of,
)
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

_OPTIONS = frozenset(
    {
        *("add_special_tokens", "is_split_into_words", "kwargs", "max_length"),
        *("pad_to_multiple_of", "padding", "padding_side", "return_attention_mask"),
        *("return_length", "return_offsets_mapping", "return_overflowing_tokens"),
        *("return_special_tokens_mask", "return_tensors", "return_token_type_ids", "self"),
        *("stride", "tokenizer_kwargs", "truncation", "verbose"),
    }
)
"""Parameters of a tokenizer that are not data."""

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

    Attributes:
        columns: those that the processor accepts.
    """

    def __init__(self, processor: Any, *, max_length: int | None, cut_media: bool) -> None:
        self._processor = processor
        self._cut_media = cut_media
        self._names, self._takes_any = parameters_of(processor)
        self._bos = automatic_bos(tokenizer_of(processor))
        self._limits: dict[str, Any] = {}
        if max_length is not None:
            limits = {"truncation": True, "max_length": max_length}
            self._limits = {one: limits[one] for one in limits if self._takes(one)}
        self.columns = self._names - _OPTIONS
        if not self.columns and self._takes_any:
            self.columns = _UNNAMED
        elif "audio" in self.columns and self._takes_any:
            self.columns |= {"sampling_rate"}

    def _takes(self, argument: str) -> bool:
        return self._takes_any or argument in self._names

    def __call__(self, rows: Sequence[Row]) -> list[Mapping[str, Any]]:
        """Tokenize rows and return the outputs of each, without columns that are not accepted."""
        kept = []
        for row in rows:
            own = {name: row[name] for name in row if name in self.columns}
            own = {name: value for name, value in own.items() if value is not None}
            if isinstance(own.get("text"), str):
                # Rendered chats begin with the start token, which the tokenizer would add again.
                own["text"] = own["text"].removeprefix(self._bos)
            kept.append(own)
        with _restored_settings(tokenizer_of(self._processor)):
            if not _is_tokenizer(self._processor) or any(row.keys() != {"text"} for row in kept):
                return [self._one(row) for row in kept]
            outputs = dict(self._processor([row["text"] for row in kept], **self._limits))
            return [{name: outputs[name][at] for name in outputs} for at in range(len(kept))]

    def ids(self, text: str) -> list[int]:
        """Tokenize a text, truncated like the rows."""
        ids: list[int] = list(self([{"text": text}])[0]["input_ids"])
        return ids

    def _one(self, row: Row) -> Mapping[str, Any]:
        has_media = bool(MEDIA & row.keys())
        is_cut = not has_media or (self._cut_media and "audio" not in row)
        options = dict(self._limits) if is_cut else {}
        if has_media and self._takes("return_tensors"):
            options["return_tensors"] = "pt"
        outputs: Mapping[str, Any] = self._processor(**row, **options)
        return outputs


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


class ModelFacts(TypedDict, total=False):
    """What the preparation of data has to know of the model; all of it may be unknown."""

    model_input_names: Collection[str]
    """The inputs that the model's forward takes; other columns are dropped."""
    main_inputs: Collection[str]
    """Further names of inputs that represent a whole sample."""
    vocab_size: int | None
    """Rows of the model's embedding, to check token ids against."""
    model_max_length: int | None
    """Maximum number of tokens of the model."""
    in_table: bool
    """The model has a table of ``model_max_length`` positions, and fails beyond."""


@dataclass(frozen=True)
class Preparation:
    """Settings for the conversion of rows to samples.

    Attributes:
        args: the user's arguments.
        processor: the tokenizer or processor; may be ``None`` for tokenized data.
        name: name of the data in messages.
        template: a registered data set's function from a row to text.
        model_input_names: see :class:`ModelFacts`; empty if unknown.
        main_inputs: names of inputs; a row that has one of them needs no processor.
        vocab_size: see :class:`ModelFacts`.
        model_max_length: see :class:`ModelFacts`.
        in_table: see :class:`ModelFacts`.
        for_training: add labels.
    """

    args: DatasetArguments
    processor: Any = None
    name: str = "The data"
    template: Callable[[Row], Mapping[str, Any]] | None = None
    model_input_names: Collection[str] = ()
    main_inputs: frozenset[str] = MAIN_INPUTS
    vocab_size: int | None = None
    model_max_length: int | None = None
    in_table: bool = False
    for_training: bool = False

    @classmethod
    def of(
        cls,
        source: Source,
        args: DatasetArguments,
        processor: Any,
        *,
        for_training: bool = False,
        **model: Unpack[ModelFacts],
    ) -> Preparation:
        """The settings for opened data, whose rows a registered data set has a template for."""
        template = None
        if source.owner is not None:
            split = split_for("train" if for_training else "calibration", args.splits)
            owner = source.owner(dataset_args=replace(args), split=split, processor=processor)
            template = owner.dataset_template
        facts: dict[str, Any] = dict(model)
        facts["main_inputs"] = MAIN_INPUTS.union(facts.get("main_inputs", ()))
        return cls(args, processor, source.name, template, for_training=for_training, **facts)

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
        self._own_encoder: Encoder | None = None
        self._read = self._empty = self._long = self._longest = 0
        self._has_own_collator = callable(args.data_collator)
        # samples are cut to max_seq_length, here or by the collator
        self._cuts = preparation.for_training or args.data_collator == "truncation"

    def __call__(self, numbered: Sequence[tuple[int, Row]]) -> list[Sample]:
        """Convert rows to samples; rows without tokens are dropped."""
        self._read += len(numbered)
        made: dict[int, Sample] = {}
        raw: dict[int, Row] = {}
        for index, given in numbered:
            with self._errors_of(index):
                row = self._rows(given)
                if self._is_tokenized(row):
                    made[index] = self._tokenized(row)
                    continue
                text = row.get("text")
                has_words = text is not None and (not isinstance(text, str) or text.strip())
                if has_words or "text" not in row or MEDIA & row.keys():
                    self._check_raw(row)
                    raw[index] = resolve_media(row, self._encoder.columns)
                    self._rows.check_columns(raw[index], self._encoder.columns)
                    check_placeholders(self._it.processor, raw[index], self._encoder.columns)
        made.update(self._encoded(raw) if raw else {})
        kept = []
        for index, _ in numbered:
            if index in made and num_tokens(made[index]) != 0:
                with self._errors_of(index):
                    check_token_ids(made[index], self._it.vocab_size)
                kept.append(made[index])
            else:
                self._empty += 1
        return kept

    def _errors_of(self, index: int) -> Any:
        return errors_naming(f"{self._it.name}: sample {index}")

    def report(self, samples: int, wanted: int | None, *, packed: bool) -> None:
        """Warn about dropped and long samples, and raise if no sample is left."""
        name, limit = self._it.name, self._it.model_max_length
        if not samples and packed and self._read > self._empty:
            raise DatasetError(
                f"{name} has fewer than {self._it.max_length} tokens in all, which is one sample.",
                "Give more data, or a smaller max_seq_length.",
            )
        if not samples:
            problem = f"All {self._read} samples are without tokens" if self._read else "no sample"
            raise DatasetError(
                f"{name} is empty: {problem}.",
                "Give data that holds text or tokens.",
            )
        self._rows.report()
        if self._empty:
            logger.warning(f"{name}: {self._empty} samples without tokens are left out.")
        if self._long:
            remedy = f" max_seq_length={limit} cuts them." if self._cuts else ""
            logger.warning(
                f"{name}: {self._long} samples that came tokenized have up to {self._longest} "
                f"tokens, and the model takes {limit}: "
                + (
                    f"they are cut to {limit}."
                    if self._it.in_table
                    else f"they are used as they are.{remedy}"
                )
            )
        if wanted is not None and samples < wanted:
            logger.warning(
                f"{name}: {wanted} samples were asked for, there are only {samples}. Give more "
                "data, or a smaller number."
            )

    def _is_tokenized(self, row: Row) -> bool:
        """Return True if a row is tokenized already."""
        inputs = self._it.main_inputs & row.keys()
        given = {name for name in inputs if row[name] is not None}
        if inputs and not given and row.get("text") is None:
            raise DatasetError(
                f"has no value (None) in its column {min(inputs)!r}.",
                "Give the token ids of each sample, or leave such samples out.",
            )
        return bool(given) and ("input_ids" in given or "text" not in row)

    def _tokenized(self, row: Row) -> Sample:
        it, args = self._it, self._it.args
        if self._has_own_collator and not it.for_training and not args.concatenate_data:
            return row  # a user's own collator gets tokenized rows unchanged
        sample = from_tokenized(
            row,
            it.model_input_names,
            use_loss_mask=args.use_loss_mask,
            keep_labels=it.for_training,
        )
        if not it.for_training:
            return self._within_limit(sample)
        sample = self._with_labels(sample, row)
        if args.max_seq_length is not None and not args.concatenate_data:
            (sample,) = cut_series([sample], args.max_seq_length)  # collators of training do not
            sample = truncate_all(sample, args.max_seq_length)
        sample = self._within_limit(sample)
        return without_batch_axis(sample) if self._has_own_collator else sample

    def _with_labels(self, sample: Sample, row: Row) -> Sample:
        is_known = self._it.processor is not None or isinstance(row.get("prompt"), str)
        prompt = self._rows.prompt_of(row) if is_known else ""
        return add_labels(sample, self._encoder.ids(prompt) if prompt else ())

    def _within_limit(self, sample: Sample) -> Sample:
        """Truncate a tokenized sample to the model's table of positions, and count long samples."""
        limit, asked = self._it.model_max_length, self._it.args.max_seq_length
        if limit is None or self._it.args.concatenate_data:
            return sample
        length = len(sample.get("input_ids", ()))
        if self._cuts and asked is not None:
            length = min(length, asked)
        if length <= limit:
            return sample
        self._long, self._longest = self._long + 1, max(self._longest, length)
        return truncate_all(sample, limit) if self._it.in_table else sample

    def _check_raw(self, row: Row) -> None:
        """Refuse a text that no tokenizer takes, and any row where there is no tokenizer."""
        if self._it.processor is None:
            raise NoTokenizerError(
                "is not tokenized, and there is no tokenizer.",
                "Give the model's tokenizer, or data with input_ids.",
            )
        text: Any = row.get("text")
        if text is not None and not isinstance(text, str):
            turns = isinstance(text, list) and any(isinstance(one, Mapping) for one in text)
            fault = f": {find_chat_fault(text)}" if turns else ""
            raise DatasetError(
                f"has a {type(text).__name__} for its text{fault}.",
                "Make a string of it with a preprocessing_func, or name another text_column.",
            )

    def _encoded(self, rows: Mapping[int, Row]) -> dict[int, Sample]:
        """Run rows of text, images or audio through the processor."""
        try:
            outputs = self._encoder(list(rows.values()))
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(
                f"{self._it.name}: sample {min(rows)} (or one of the {len(rows) - 1} after it) is "
                f"refused by the processor: {error!r}.",
                "Check the data, or prepare it in a preprocessing_func.",
            ) from error
        it, made = self._it, {}
        for (index, row), output in zip(rows.items(), outputs, strict=True):
            with self._errors_of(index):
                sample = from_processor(output, it.model_input_names, keep_labels=it.for_training)
            if it.for_training:
                sample = self._with_labels(sample, row)
            if it.args.pad_to_max_length and not it.args.concatenate_data:
                sample = self._padded(sample)
            made[index] = without_batch_axis(sample) if self._has_own_collator else sample
        return made

    def _padded(self, sample: Sample) -> Sample:
        length = self._it.max_length
        if length is None:
            raise DatasetError(
                "The length to pad to is not known: the tokenizer has no limit.",
                "Give max_seq_length.",
            )
        pad_id = pad_id_of(self._it.processor, self._it.vocab_size)
        side = padding_side_of(self._it.processor)
        names = token_sequences([sample])
        return sample | {one: pad(sample, one, length, pad_id=pad_id, side=side) for one in names}

    @property
    def _encoder(self) -> Encoder:
        """The encoder, made when the first row needs it."""
        if self._own_encoder is None:
            self._own_encoder = Encoder(
                self._it.processor,
                max_length=self._it.max_length,
                cut_media=self._it.args.max_seq_length is not None,
            )
        return self._own_encoder


# --------------------
# Packing of samples into sequences of fixed length.


class Packer:
    """Concatenates samples in order and yields pieces of ``length`` tokens.

    Padding is dropped, which could fill whole pieces, and so is an incomplete piece at the end.
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
            if not self._held:
                self._held = {name: [] for name in sample}
            if self._held.keys() != sample.keys():
                raise DatasetError(
                    f"Samples with {', '.join(sample)} cannot be joined to samples with "
                    f"{', '.join(self._held)}.",
                    "Give all samples the same columns.",
                )
            mask = sample.get("attention_mask") or ()
            for name, tokens in sample.items():
                real = [one for one, is_real in zip(tokens, mask, strict=False) if is_real]
                self._held[name] += real if len(tokens) == len(mask) else tokens
            yield from self._complete()

    def _complete(self) -> Iterator[Sample]:
        end = min(map(len, self._held.values())) // self._length * self._length
        for start in range(0, end, self._length):
            yield {
                name: tokens[start : start + self._length] for name, tokens in self._held.items()
            }
        self._held = {name: tokens[end:] for name, tokens in self._held.items()}
