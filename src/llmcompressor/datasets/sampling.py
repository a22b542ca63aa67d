# SPDX-License-Identifier: Apache-2.0
"""Sampling of rows: order, number, and partition among processes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils.data import Sampler

from llmcompressor.datasets.rows import Chain, Rows, Slice, Stream
from llmcompressor.datasets.samples import Sample
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.runtime.processes import Processes, rank_and_world_size

__all__ = [
    "LengthAwareSampler",
    "Part",
    "cut",
    "draw_order",
    "get_rank_partition",
    "has_same_rows_everywhere",
    "own_sample_count",
    "own_samples",
    "parse_split",
    "partition",
    "pick_split",
    "rank_and_world_size",
    "rank_order",
    "split_for",
]


def partition(count: int, rank: int, size: int) -> tuple[int, int]:
    """Start and end (exclusive) of a rank's part of ``count`` items.

    >>> [partition(64, rank, 3) for rank in range(3)]
    [(0, 21), (21, 42), (42, 64)]
    """
    return count * rank // size, count * (rank + 1) // size


def get_rank_partition(split: str, num_samples: int) -> str:
    """Return the slice of a split that this process should load, of ``num_samples`` in total.

    >>> get_rank_partition("train", 64)
    'train[0:64]'

    Args:
        split: a split without a slice.
        num_samples: samples of all processes together.

    Raises:
        DatasetError: if the split has a slice already.
    """
    if "[" in split or "]" in split:
        raise DatasetError(
            f"The split {split!r} is cut already.", "Give the split's name without [...]."
        )
    start, stop = partition(num_samples, *rank_and_world_size())
    return f"{split}[{start}:{stop}]"


class LengthAwareSampler(Sampler[int]):
    """Yields row indices from the longest to the shortest, so that batches have similar lengths.

    It is for a script's own ``DataLoader``; runs use ``draw_order``.

    Args:
        data_source: a ``Dataset`` with ``input_ids`` or ``decoder_input_ids``; without them its
            rows are taken in order.
        num_samples: maximum number of samples; the shortest are dropped.
        batch_size: has no effect on the order.
    """

    def __init__(
        self, data_source: Any, num_samples: int | None = None, batch_size: int = 1
    ) -> None:
        self.data_source = data_source
        self.batch_size = batch_size
        size = len(data_source)
        self.num_samples = min(num_samples or size, size)
        names = ("input_ids", "decoder_input_ids")
        tokens = next((name for name in names if name in data_source.column_names), None)
        self.order = list(range(size))
        if tokens is None:
            logger.warning("The data has no column input_ids: its rows are taken in order.")
        else:
            lengths = [len(row) for row in data_source[tokens]]
            self.order.sort(key=lambda number: -lengths[number])

    def __iter__(self) -> Iterator[int]:
        return iter(self.order[: self.num_samples])

    def __len__(self) -> int:
        return self.num_samples


def draw_order(size: int, *, shuffle: bool, seed: int) -> Tensor:
    """Row indices in sampling order, long ``[size]``."""
    if not shuffle:
        return torch.arange(size)
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def rank_order(order: Tensor, wanted: int, rank: int, size: int) -> Tensor:
    """Return a rank's part of an order: its slice of the first ``wanted`` rows, then spares.

    The spares are this rank's share of the remaining rows. They replace rows that turn out to
    be empty.
    """
    start, stop = partition(min(wanted, len(order)), rank, size)
    return torch.cat([order[:wanted][start:stop], order[wanted:][rank::size]])


def has_same_rows_everywhere(rows: Rows, size: int) -> bool:
    """Return True if all processes have the same rows, by number and by first and last rows."""
    digests: list[str | None] = [None] * size
    torch.distributed.all_gather_object(digests, _digest(rows))
    return len(set(digests)) == 1


def own_sample_count(rows: Rows, wanted: int | None, processes: Processes) -> int | None:
    """Number of samples that a process loads when processes share their samples.

    All wanted samples if all processes have the same rows, else this process's part.
    """
    digests = processes.all_gather("rows", _digest(rows) if processes.count > 1 else None)
    if wanted is None or len(set(digests)) == 1:
        return wanted
    start, stop = partition(wanted, processes.rank, processes.count)
    return stop - start


def own_samples(samples: list[Sample], wanted: int | None, processes: Processes) -> list[Sample]:
    """Like :func:`own_sample_count`, for a stream, which is compared once it is read."""
    count = len(samples)
    digest = _digest_of(count, samples) if processes.count > 1 else None
    if wanted is None or len(set(processes.all_gather("samples of a stream", digest))) == 1:
        return samples
    start, stop = partition(wanted, processes.rank, processes.count)
    return samples[: stop - start]


def _digest(rows: Rows) -> str:
    count = len(rows)
    some = rows.fetch(sorted({*range(min(4, count)), *range(max(0, count - 4), count)}))
    return _digest_of(count, some)


def _digest_of(count: int, some: Sequence[Mapping[str, Any]]) -> str:
    shown = [[(name, _shown(value)) for name, value in row.items()] for row in some]
    return hashlib.sha256(repr((count, shown)).encode()).hexdigest()


def _shown(value: Any) -> str:
    """Represent a value as text that is the same in every process."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    return (
        repr(plain) if isinstance(plain, (str, int, float, list, tuple)) else type(value).__name__
    )


# --------------------
# Splits: which one is meant, and the slices in ``"train[:5%]"``.

_PART = re.compile(
    r"(?P<name>[^\[\]+]+?)\s*"
    r"(?:\[\s*(?P<start>-?\d+%?)?\s*:\s*(?P<stop>-?\d+%?)?\s*\])?"
)

_WHOLE = 100
"""Per cent."""


@dataclass(frozen=True)
class Part:
    """One piece of a split's description: ``train[10:20]`` or ``train[:5%]``.

    Attributes:
        name: the split.
        start: its first row as written, ``None`` for the first of all.
        stop: the row after its last one as written, ``None`` for the end.
    """

    name: str
    start: str | None = None
    stop: str | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing is cut off."""
        return self.start is None and self.stop is None

    def bounds(self, size: int) -> tuple[int, int]:
        """First row and the row after the last, of ``size`` rows.

        >>> Part("train", None, "5%").bounds(200), Part("train", "-10", None).bounds(200)
        ((0, 10), (190, 200))
        """
        return _place(self.start, size, 0), _place(self.stop, size, size)


def _place(text: str | None, size: int, default: int) -> int:
    if text is None:
        return default
    place = round(int(text[:-1]) * size / 100) if text.endswith("%") else int(text)
    return min(size, max(0, place + size if place < 0 else place))


def parse_split(text: str) -> list[Part]:
    """The pieces of ``"train[:5%]+test"``.

    Raises:
        DatasetError: for a description that is not of this form.
    """
    parts = []
    for piece in text.split("+"):
        match = _PART.fullmatch(piece.strip())
        if match is None:
            raise DatasetError(
                f"The split {text!r} cannot be read.",
                "Write it as 'train', 'train[:512]', 'train[10%:20%]' or 'train[:5%]+test'.",
            )
        part = Part(match["name"].strip(), match["start"], match["stop"])
        for place in (part.start, part.stop):
            if place and place.endswith("%") and abs(int(place[:-1])) > _WHOLE:
                raise DatasetError(
                    f"The split {text!r} goes to {place} of its rows.",
                    "A split has 100% of them.",
                )
        parts.append(part)
    return parts


def split_for(role: str, splits: str | Sequence[str] | Mapping[str, str] | None) -> str | None:
    """The split that plays a role, of the user's ``splits`` in any of its forms.

    A string is the split. Of a dict it is the role's entry. Of a list it is the element whose
    name is the role's, or else the first.

    Args:
        role: "calibration" or "train".
        splits: what the user gave.
    """
    if splits is None or isinstance(splits, str):
        return splits
    if isinstance(splits, Mapping):
        if role not in splits:
            raise DatasetError(
                f"The argument 'splits' has no key {role!r}, only {', '.join(sorted(splits))}.",
                f"Name the split to use, for instance splits={{'{role}': 'train[:5%]'}}.",
            )
        if ignored := sorted(set(splits) - {role}):
            logger.warning(f"The splits {', '.join(ignored)} are not used for {role}.")
        return splits[role]
    named = [split for split in splits if parse_split(split)[0].name == role]
    return (named or list(splits))[0]


def pick_split(splits: Mapping[str, Rows | Stream], wanted: str | None, what: str) -> Rows | Stream:
    """The rows of one split: the wanted one, the only one, or ``train``.

    Args:
        splits: rows by the name of their split.
        wanted: a description such as ``"train[:5%]"``, or ``None``.
        what: the data's name, for an error.
    """
    if not splits:
        raise DatasetError(f"{what} has no splits.", "Give data that is not empty.")
    if wanted is None:
        if len(splits) == 1:
            return next(iter(splits.values()))
        if "train" not in splits:
            raise DatasetError(
                f"{what} has several splits: {', '.join(sorted(splits))}.",
                f"Choose one, for instance splits={min(splits)!r}.",
            )
        return splits["train"]
    pieces = []
    for part in parse_split(wanted):
        if part.name not in splits:
            raise DatasetError(
                f"{what} has no split {part.name!r}; its splits are {', '.join(sorted(splits))}.",
                did_you_mean(part.name, splits),
            )
        pieces.append(_cut_part(splits[part.name], part))
    return _join(pieces, wanted)


def cut(rows: Rows | Stream, wanted: str | None) -> Rows | Stream:
    """Data that has no splits, cut by the slice in ``wanted``; the name before it says nothing."""
    if wanted is None:
        return rows
    return _join([_cut_part(rows, part) for part in parse_split(wanted)], wanted)


def _cut_part(rows: Rows | Stream, part: Part) -> Rows | Stream:
    if part.whole:
        return rows
    if isinstance(rows, Stream):
        return _cut_stream(rows, part)
    return Slice(rows, *part.bounds(len(rows)))


def _cut_stream(rows: Stream, part: Part) -> Stream:
    if any(
        place and (place.startswith("-") or place.endswith("%"))
        for place in (part.start, part.stop)
    ):
        raise DatasetError(
            f"A stream cannot be cut at {part.start or ''}:{part.stop or ''}: its length is "
            "not known.",
            "Give row numbers such as 'train[100:600]', or streaming=False.",
        )
    start = int(part.start) if part.start else 0
    return rows.cut(start, int(part.stop) if part.stop else None)


def _join(pieces: list[Rows | Stream], wanted: str) -> Rows | Stream:
    if len(pieces) == 1:
        return pieces[0]
    sized = [piece for piece in pieces if not isinstance(piece, Stream)]
    if len(sized) < len(pieces):
        raise DatasetError(
            f"Streams cannot be joined as in {wanted!r}.", "Name one split, or streaming=False."
        )
    return Chain(sized)
