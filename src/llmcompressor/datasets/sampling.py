# SPDX-License-Identifier: Apache-2.0
"""Sampling of rows and their conversion to samples: order, number, partition among processes.

Rows are taken until there are enough samples, so that of a million rows only the needed ones are
read and tokenized. All work is done in one process, in sampling order: the same rows and seed give
the same samples for any number of workers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from llmcompressor.datasets.rows import Row, Rows, Stream
from llmcompressor.datasets.samples import Sample
from llmcompressor.datasets.tokenize import Packer, Preparation, SampleMaker
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.runtime.processes import Processes, rank_and_world_size

__all__ = [
    "LengthAwareSampler",
    "StreamedSamples",
    "get_rank_partition",
    "own_sample_count",
    "own_samples",
    "prepare_samples",
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
# Samples of the chosen rows.

_CHUNK = 64


def prepare_samples(
    rows: Rows | Stream,
    preparation: Preparation,
    *,
    wanted: int | None,
    shuffle: bool,
    seed: int,
    distributed: bool = False,
) -> list[Sample]:
    """Take rows until there are ``wanted`` samples.

    Args:
        rows: the raw data.
        preparation: the settings.
        wanted: samples to return, of all processes together; ``None`` for all.
        shuffle: take rows in random order without repetition.
        seed: seed of that order.
        distributed: with several processes, return only this one's part.

    Returns:
        The samples; fewer than ``wanted`` (with a warning) if the data has not enough.

    Raises:
        DatasetError: a row cannot be used, or no sample is left.
    """
    args = preparation.args
    _warn_of_limit(preparation)
    packer = Packer(preparation.max_length) if args.concatenate_data else None
    rank, size = rank_and_world_size() if distributed else (0, 1)
    own = wanted
    if wanted is not None:
        start, stop = partition(wanted, rank, size)
        own = stop - start
    numbered: Iterator[tuple[int, Row]]
    if isinstance(rows, Stream):
        stream = rows.shuffled(seed) if shuffle else rows
        numbered = itertools.islice(
            enumerate(iterate_stream(stream, preparation.name)), rank, None, size
        )
    else:
        order = draw_order(len(rows), shuffle=shuffle, seed=seed)
        if size > 1 and has_same_rows_everywhere(rows, size):
            # The number of rows that fill a rank's pieces is unknown: each rank shares all rows.
            first = len(order) if packer or wanted is None else wanted
            order = rank_order(order, first, rank, size)
        numbered = _fetch_in_order(rows, order.tolist(), own)
    return _collect(numbered, preparation, packer, own)


def _warn_of_limit(preparation: Preparation) -> None:
    asked, limit = preparation.args.max_seq_length, preparation.model_limit
    if asked is not None and limit is not None and asked > limit:
        logger.warning(
            f"max_seq_length is {asked}, and the model takes {limit} tokens: text is cut to "
            f"{limit} tokens."
        )


def _fetch_in_order(
    rows: Rows, order: Sequence[int], wanted: int | None
) -> Iterator[tuple[int, Row]]:
    """Yield the rows in an order, read in chunks of at most ``wanted`` rows."""
    chunk = _CHUNK if wanted is None else max(1, min(_CHUNK, wanted))
    for start in range(0, len(order), chunk):
        indices = order[start : start + chunk]
        yield from zip(indices, rows.fetch(indices), strict=True)


def iterate_stream(stream: Stream, name: str) -> Iterator[Row]:
    """Yield the rows of a stream, with exceptions turned into errors about the data.

    Raises:
        DatasetError: the stream cannot be read.
    """
    rows = iter(stream)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(f"{name} cannot be read on: {error!r}.", "Check it.") from error
        yield row


def _collect(
    numbered: Iterator[tuple[int, Row]],
    preparation: Preparation,
    packer: Packer | None,
    wanted: int | None,
) -> list[Sample]:
    prepare = SampleMaker(preparation)
    samples: list[Sample] = []
    while wanted is None or len(samples) < wanted:
        missing = _CHUNK if wanted is None or packer else wanted - len(samples)
        rows = list(itertools.islice(numbered, min(_CHUNK, missing)))
        if not rows:
            break
        made = prepare(rows)
        samples += packer(made) if packer else made
    prepare.report(len(samples), wanted, packed=packer is not None)
    return samples[:wanted]


# --------------------
# Training samples of a stream, prepared lazily.

_STREAM_CHUNK = 16


class StreamedSamples(IterableDataset[Sample]):
    """The samples of a stream in order; each iteration starts from the beginning.

    With several workers, each prepares every n-th row.

    Args:
        rows: the raw data.
        preparation: the settings.
    """

    def __init__(self, rows: Stream, preparation: Preparation) -> None:
        self._rows = rows
        self._preparation = preparation
        self._given = 0  # samples of an earlier pass

    def __iter__(self) -> Iterator[Sample]:
        args = self._preparation.args
        packer = Packer(self._preparation.max_length) if args.concatenate_data else None
        prepare = SampleMaker(self._preparation)
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        numbered: Iterator[tuple[int, Row]]
        rows_of_all = enumerate(iterate_stream(self._rows, self._preparation.name))
        numbered = itertools.islice(rows_of_all, first, None, step)
        count = 0
        while rows := list(itertools.islice(numbered, _STREAM_CHUNK)):
            made = prepare(rows)
            for sample in packer(made) if packer else made:
                count += 1
                self._given = max(self._given, count)
                yield sample
        if count or worker is not None:  # one of several workers may get no row
            return
        name = self._preparation.name
        if not self._given:
            raise DatasetError(f"{name} has no samples.", "Give data that holds text.")
        raise DatasetError(
            f"{name} has ended after {self._given} samples, and cannot be read once more.",
            "Give a data set that can, or train for no more steps than it has samples for "
            "(max_train_samples takes them first).",
        )
