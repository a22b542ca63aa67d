# SPDX-License-Identifier: Apache-2.0
"""Settings for the conversion of raw rows to samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets.encode import tokenizer_of
from llmcompressor.datasets.rows import Row
from llmcompressor.datasets.samples import MAIN_INPUTS

__all__ = ["Preparation"]

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
