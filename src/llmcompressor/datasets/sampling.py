# SPDX-License-Identifier: Apache-2.0
"""Sampling of rows: order, number, and partition among processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils.data import Sampler

from llmcompressor.datasets.rows import Rows
from llmcompressor.datasets.samples import Sample
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.processes import Processes, world

__all__ = [
    "LengthAwareSampler",
    "draw_order",
    "get_rank_partition",
    "own_part",
    "own_wanted",
    "partition",
    "same_everywhere",
    "share",
    "world",
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
    start, stop = partition(num_samples, *world())
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


def share(order: Tensor, wanted: int, rank: int, size: int) -> Tensor:
    """Return a rank's part of an order: its slice of the first ``wanted`` rows, then spares.

    The spares are this rank's share of the remaining rows. They replace rows that turn out to
    be empty.
    """
    start, stop = partition(min(wanted, len(order)), rank, size)
    return torch.cat([order[:wanted][start:stop], order[wanted:][rank::size]])


def same_everywhere(rows: Rows, size: int) -> bool:
    """Return True if all processes have the same rows, by number and by first and last rows."""
    digests: list[str | None] = [None] * size
    torch.distributed.all_gather_object(digests, _digest(rows))
    return len(set(digests)) == 1


def own_wanted(rows: Rows, wanted: int | None, processes: Processes) -> int | None:
    """Number of samples that a process loads when processes share their samples.

    All wanted samples if all processes have the same rows, else this process's part.
    """
    digests = processes.agree("rows", _digest(rows) if processes.count > 1 else None)
    if wanted is None or len(set(digests)) == 1:
        return wanted
    start, stop = partition(wanted, processes.rank, processes.count)
    return stop - start


def own_part(samples: list[Sample], wanted: int | None, processes: Processes) -> list[Sample]:
    """Like :func:`own_wanted`, for samples of a stream, which can be compared only once read."""
    count = len(samples)
    digest = _digest_of(count, samples) if processes.count > 1 else None
    if wanted is None or len(set(processes.agree("samples of a stream", digest))) == 1:
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
