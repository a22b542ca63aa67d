# SPDX-License-Identifier: Apache-2.0
"""Data collators: truncation to the shortest sample, or padding to the longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcompressor.datasets.samples import SEQUENCES, Sample, cut, pad
from llmcompressor.errors import DatasetError

__all__ = ["DataCollatorWithTruncation", "PaddingCollator", "TruncationCollator", "check_cuts"]

_LONGER = "Give a larger max_seq_length (--max-seq-length), or leave it out."
_WHOLE = (
    "Samples are cut to the shortest of their batch: give data_collator='padding' "
    "(--data-collator padding), which keeps all tokens, or batch_size=1."
)


@dataclass(frozen=True)
class TruncationCollator:
    """Truncates every sequence to the shortest of the batch, without padding.

    Attributes:
        max_length: maximum number of tokens.
    """

    max_length: int | None = None

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collate samples; token tensors are long ``[batch, tokens]``."""
        batch = _joined(samples)
        for name, rows in _cut(samples, self.max_length).items():
            batch[name] = _tensor(rows)
        return batch


class DataCollatorWithTruncation:
    """Truncating collator for a script's own ``DataLoader``; other values are stacked.

    Strings are dropped.

    Args:
        max_seq_length: maximum number of tokens.
    """

    def __init__(self, max_seq_length: int | None = None) -> None:
        self.max_seq_length = max_seq_length

    def __call__(
        self, features: Sequence[Mapping[str, Any]], return_tensors: str = "pt"
    ) -> dict[str, Any]:
        """Collate features, which are not changed."""
        from transformers import default_data_collator  # noqa: PLC0415  # not needed by calibration

        rows = [
            {name: _listed(value) if name in SEQUENCES else value for name, value in one.items()}
            for one in features
        ]
        columns = _cut(rows, self.max_seq_length)
        rows = [
            row | {name: column[number] for name, column in columns.items()}
            for number, row in enumerate(rows)
        ]
        batch: dict[str, Any] = default_data_collator(rows, return_tensors)
        return batch


@dataclass(frozen=True)
class PaddingCollator:
    """Pads every sequence to the longest of the batch; padding is masked.

    Attributes:
        pad_id: the padding token.
        side: "left" or "right".
    """

    pad_id: int = 0
    side: str = "right"

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collate samples; token tensors are long ``[batch, tokens]``."""
        batch = _joined(samples)
        for name in _sequences(samples):
            length = max(len(sample[name]) for sample in samples)
            batch[name] = _tensor(
                [
                    pad(sample, name, length, pad_id=self.pad_id, side=self.side)
                    for sample in samples
                ]
            )
        return batch


def check_cuts(
    samples: Sequence[Sample], batch_size: int, max_length: int | None, placeholders: frozenset[int]
) -> None:
    """Refuse samples that would lose placeholders in a :class:`TruncationCollator`.

    The model would still get all images, and fail on more images than placeholders.

    Args:
        samples: in the order of the batches.
        batch_size: samples in a batch.
        max_length: that of the collator.
        placeholders: ids of placeholder tokens for images, videos and audio.

    Raises:
        DatasetError: a sample would lose placeholders.
    """
    if not placeholders:
        return
    for number, sample in enumerate(samples):
        tokens = sample.get("input_ids")
        if not isinstance(tokens, list) or SEQUENCES.issuperset(sample):
            continue  # it has no other inputs
        first = number - number % batch_size
        batch = samples[first : first + batch_size]
        shortest = min(len(one["input_ids"]) for one in batch if "input_ids" in one)
        asked = len(tokens) if max_length is None else max_length
        for length, remedy in ((asked, _LONGER), (shortest, _WHOLE)):
            kept = cut(sample, "input_ids", length)
            lost = sum(map(placeholders.__contains__, tokens)) - sum(
                map(placeholders.__contains__, kept)
            )
            if lost:
                raise DatasetError(
                    f"Cut from {len(tokens)} to {length} tokens, sample {number} would lose {lost} "
                    "of those that stand for its pictures, videos or sounds, and the model gets "
                    "all of these.",
                    remedy,
                )


def _cut(samples: Sequence[Sample], max_length: int | None) -> dict[str, list[list[int]]]:
    """Truncate the sequences of a batch to the shortest one and to ``max_length``."""
    cut_rows = {}
    for name in _sequences(samples):
        shortest = min(len(sample[name]) for sample in samples)
        length = shortest if max_length is None else min(shortest, max_length)
        cut_rows[name] = [cut(sample, name, length) for sample in samples]
    return cut_rows


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _tensor(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.long)


def _sequences(samples: Sequence[Sample]) -> list[str]:
    """Names of the token sequences that all samples have, in the first one's order."""
    return [
        name
        for name, value in samples[0].items()
        if name in SEQUENCES
        and isinstance(value, list)
        and all(isinstance(sample.get(name), list) for sample in samples)
    ]


def _joined(samples: Sequence[Sample]) -> dict[str, Any]:
    """Concatenate all inputs that are not token sequences along their leading axis."""
    names = dict.fromkeys(
        name
        for sample in samples
        for name, value in sample.items()
        if not (name in SEQUENCES and isinstance(value, list))
    )
    batch: dict[str, Any] = {}
    for name in names:
        values = [sample[name] for sample in samples if name in sample]
        if all(isinstance(value, Tensor) for value in values):
            batch[name] = torch.cat(values)
        else:
            batch[name] = values[0] if len(values) == 1 else values
    return batch
