# SPDX-License-Identifier: Apache-2.0
"""Samples that are series in place of tokens: embeddings, sounds and their features.

A series is a tensor with a batch of one, ``[1, ...]``, and an axis of steps, which are what tokens
are elsewhere: they are cut, padded and masked alike. Beside token ids, whose number of placeholders
belongs to them, series stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from llmcompressor.datasets.samples import Sample, first_kept

_SERIES = ("inputs_embeds", "input_values", "input_features")
_PLAIN_DIMS = {"inputs_embeds": 3, "input_values": 2}
"""Dimensions of those whose second axis is that of the steps: each step a vector, or a number."""


class Series(NamedTuple):
    """The series of some samples."""

    name: str
    axis: int
    lengths: list[int]


def find_series(samples: Sequence[Sample]) -> Series | None:
    """Return the series that samples have in place of tokens; ``None`` if they have none.

    The steps are counted by the attention mask, or are where the samples differ.
    """
    for name in _SERIES:
        values = [sample.get(name) for sample in samples]
        if not all(isinstance(value, Tensor) for value in values):
            continue
        if any({"input_ids", "decoder_input_ids"} & sample.keys() for sample in samples):
            return None
        tensors = [value for value in values if isinstance(value, Tensor)]
        axis = _axis_of_steps(name, samples[0], tensors)
        return None if axis is None else Series(name, axis, [one.shape[axis] for one in tensors])
    return None


def _axis_of_steps(name: str, sample: Sample, values: Sequence[Tensor]) -> int | None:
    shapes = [value.shape for value in values]
    if len({len(shape) for shape in shapes}) > 1:
        return None
    if _PLAIN_DIMS.get(name) == len(shapes[0]):
        return 1
    mask = sample.get("attention_mask")
    masked = len(mask) if isinstance(mask, list) else None
    for axis, sizes in enumerate(zip(*shapes, strict=True)):
        if axis and (sizes[0] == masked or len(set(sizes)) > 1):
            return axis
    return None


def cut_series(samples: Sequence[Sample], most: int | None) -> list[Sample]:
    """Cut the series of samples to the shortest and to ``most`` steps, as their masks are cut."""
    found = find_series(samples)
    if found is None:
        return list(samples)
    length = min(found.lengths if most is None else [*found.lengths, most])
    cut = []
    for sample, size in zip(samples, found.lengths, strict=True):
        start = first_kept(sample.get("attention_mask"), size, length)
        steps = sample[found.name].narrow(found.axis, start, min(length, size))
        cut.append({**sample, found.name: steps})
    return cut


def pad_series(samples: Sequence[Sample], side: str) -> list[Sample]:
    """Pad the series of samples to the longest with zeros; each then has a mask."""
    found = find_series(samples)
    if found is None or len(set(found.lengths)) == 1:
        return list(samples)
    length, padded = max(found.lengths), []
    for sample, size in zip(samples, found.lengths, strict=True):
        value: Any = sample[found.name]
        widths = [0, 0] * (value.ndim - found.axis)
        widths[-2 if side == "left" else -1] = length - size
        mask = sample.get("attention_mask", [1] * size)
        padded.append({**sample, found.name: pad_tensor(value, widths), "attention_mask": mask})
    return padded
