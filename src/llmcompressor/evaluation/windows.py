# SPDX-License-Identifier: Apache-2.0
"""Windows of token ids cut from a text, and padded batches of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmcompressor.errors import ArgumentError

__all__ = ["batches", "choose", "cut", "tokenize"]

Window = list[int]


def tokenize(texts: Iterable[str], tokenizer: Any) -> Iterator[Window]:
    """The token ids of each text, with the special tokens that the tokenizer adds."""
    for text in texts:
        yield list(tokenizer(text, verbose=False)["input_ids"])


def cut(documents: Iterable[Sequence[int]], length: int) -> list[Window]:
    """Concatenate the documents and cut them into windows of ``length`` that do not overlap.

    The rest is a shorter window, if it is long enough to predict a token.

    >>> cut([[1, 2, 3], [4, 5, 6, 7, 8]], 3)
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


def choose(windows: Sequence[Window], count: int | None, seed: int) -> list[Window]:
    """Draw ``count`` of the windows by ``seed``, in their order; all for ``None``.

    >>> choose([[0, 1], [2, 3], [4, 5]], 2, seed=0)
    [[2, 3], [4, 5]]
    """
    if count is not None and count < 1:
        raise ArgumentError(f"num_samples is {count}.", "Give 1 or more, or None for all.")
    if count is None or count >= len(windows):
        return list(windows)
    kept = random.Random(seed).sample(range(len(windows)), count)
    return [windows[index] for index in sorted(kept)]


def batches(windows: Sequence[Window], size: int) -> Iterator[tuple[Tensor, Tensor]]:
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
