# SPDX-License-Identifier: Apache-2.0
"""Samples of several lengths → one batch: cut to the shortest, or filled up to the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcompressor.datasets.samples import SEQUENCES, Sample, cut, pad

__all__ = ["PaddingCollator", "TruncationCollator"]


@dataclass(frozen=True)
class TruncationCollator:
    """Cuts every sequence to the shortest of the batch: no padding is added, and text is lost.

    Attributes:
        max_length: and to this many tokens.
    """

    max_length: int | None = None

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """A batch; token tensors are long ``[batch, tokens]``."""
        batch = _joined(samples)
        for name in _sequences(samples):
            shortest = min(len(sample[name]) for sample in samples)
            length = shortest if self.max_length is None else min(shortest, self.max_length)
            batch[name] = _tensor([cut(sample, name, length) for sample in samples])
        return batch


@dataclass(frozen=True)
class PaddingCollator:
    """Fills every sequence up to the longest of the batch; padding is masked.

    Attributes:
        pad_id: the token to fill with.
        side: "left" or "right".
    """

    pad_id: int = 0
    side: str = "right"

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """A batch; token tensors are long ``[batch, tokens]``."""
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


def _tensor(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.long)


def _sequences(samples: Sequence[Sample]) -> list[str]:
    """The inputs of tokens that every sample has, in the first one's order."""
    return [
        name
        for name, value in samples[0].items()
        if name in SEQUENCES
        and isinstance(value, list)
        and all(isinstance(sample.get(name), list) for sample in samples)
    ]


def _joined(samples: Sequence[Sample]) -> dict[str, Any]:
    """Everything that is not a sequence of tokens, joined along its leading axis."""
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
