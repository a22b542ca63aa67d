# SPDX-License-Identifier: Apache-2.0
"""What is to be made of raw rows, in one frozen object."""

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
    """What is made of a row.

    Attributes:
        args: the user's arguments.
        processor: the tokenizer or processor; ``None`` will do for tokenized data.
        name: what the data is called in messages.
        template: a registered data set's way from a row to text.
        model_input_names: the inputs that the model takes; empty if that is not known.
        main_inputs: names of inputs of which a row that has one needs no processor any more.
        vocab_size: rows of the model's embedding; ``None`` if that is not known.
        model_max_length: tokens that the model takes at most; ``None`` if that is not known.
        for_training: add labels.
        in_table: the model looks positions up, and has none beyond ``model_max_length``.
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
        """Tokens of a sample at most, as far as the model and the tokenizer say."""
        tokenizer_limit = getattr(tokenizer_of(self.processor), "model_max_length", None)
        limits = [
            limit
            for limit in (self.model_max_length, tokenizer_limit)
            if isinstance(limit, int) and 0 < limit < _NO_LIMIT
        ]
        return min(limits, default=None)

    @property
    def max_length(self) -> int | None:
        """Tokens of a sample at most: what the user, the model and the tokenizer allow."""
        limits = (self.model_limit, self.args.max_seq_length)
        return min((limit for limit in limits if limit is not None), default=None)
