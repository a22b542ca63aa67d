# SPDX-License-Identifier: Apache-2.0
"""Packing of samples into sequences of fixed length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmcompressor.datasets.samples import Sample
from llmcompressor.errors import DatasetError

__all__ = ["Packer"]


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
