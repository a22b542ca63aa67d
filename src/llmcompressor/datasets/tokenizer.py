# SPDX-License-Identifier: Apache-2.0
"""Tokenization of rows with the user's tokenizer or processor, whose state is restored."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llmcompressor.datasets.rows import Row
from llmcompressor.errors import DatasetError

__all__ = ["Encoder", "automatic_bos", "pad_id_of", "padding_side_of", "tokenizer_of"]

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


def parameters_of(processor: Any) -> tuple[frozenset[str], bool]:
    """Return the names of a processor's parameters, and True if it takes ``**kwargs``."""
    if not callable(processor):
        raise DatasetError(
            f"A {type(processor).__name__} cannot tokenize text.",
            "Give the model's tokenizer or processor.",
        )
    parameters = inspect.signature(processor).parameters.values()
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = frozenset(p.name for p in parameters if p.kind not in variable)
    return names, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


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
