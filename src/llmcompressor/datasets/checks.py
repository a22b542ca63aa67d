# SPDX-License-Identifier: Apache-2.0
"""Check of token ids against the model's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcompressor.datasets.samples import IGNORED_LABEL, token_list
from llmcompressor.errors import DatasetError

__all__ = ["check_token_ids"]

_TOKENS = ("input_ids", "decoder_input_ids", "labels")


def check_token_ids(sample: Mapping[str, Any], vocab_size: int | None, where: str) -> None:
    """Refuse token ids outside ``[0, vocab_size)``.

    Args:
        sample: ``input_ids``, ``decoder_input_ids`` and ``labels`` are checked if present.
            A label may also be the ignored one, -100.
        vocab_size: rows of the model's embedding; ``None`` if unknown.
        where: description of the sample, for the error.

    Raises:
        DatasetError: names the first id without an embedding.
    """
    if vocab_size is None:
        return
    for name in _TOKENS:
        ids = token_list(sample[name]) if name in sample else None
        if ids and name == "labels":
            ids = [token for token in ids if token != IGNORED_LABEL]
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            continue
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise DatasetError(
            f"{where} holds the token id {wrong} in its {name}, and the model's vocabulary ends at "
            f"{vocab_size - 1}.",
            "Tokenize with the model's own tokenizer.",
        )
