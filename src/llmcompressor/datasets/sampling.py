# SPDX-License-Identifier: Apache-2.0
"""Sampling of rows and their conversion to samples: order, number, partition among processes.

Rows are taken until there are enough samples, so that of a million rows only the needed ones are
read and tokenized. All work is done in one process, in sampling order: the same rows and seed give
the same samples for any number of workers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from llmcompressor.datasets.rows import Row, Rows, Stream
from llmcompressor.datasets.samples import Sample
from llmcompressor.datasets.tokenize import Packer, Preparation, SampleMaker
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.runtime.processes import Processes, rank_and_world_size

Numbered = Iterator[tuple[int, Row]]


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

    It is for a script's own ``DataLoader``; runs draw their rows.

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


# --------------------
# Which rows and samples are a process's own.


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
    rows = Rows(len(samples), lambda indices: [samples[index] for index in indices])
    return samples[: own_sample_count(rows, wanted, processes)]


def has_same_rows_everywhere(rows: Rows, size: int) -> bool:
    """Return True if all processes have the same rows, by number and by first and last rows."""
    digests: list[str | None] = [None] * size
    torch.distributed.all_gather_object(digests, _digest(rows))
    return len(set(digests)) == 1


def _digest(rows: Rows) -> str:
    count = len(rows)
    some = rows.fetch(sorted({*range(min(4, count)), *range(max(0, count - 4), count)}))
    shown = [[(name, _shown(value)) for name, value in row.items()] for row in some]
    return hashlib.sha256(repr((count, shown)).encode()).hexdigest()


def _shown(value: Any) -> str:
    """Represent a value as text that is the same in every process."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    is_plain = isinstance(plain, (str, int, float, list, tuple))
    return repr(plain) if is_plain else type(value).__name__


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
    asked, limit = preparation.args.max_seq_length, preparation.model_limit
    if asked is not None and limit is not None and asked > limit:
        logger.warning(
            f"max_seq_length is {asked}, and the model takes {limit} tokens: text is cut to "
            f"{limit} tokens."
        )
    packer = Packer(preparation.max_length) if preparation.args.concatenate_data else None
    rank, size = rank_and_world_size() if distributed else (0, 1)
    own = wanted
    if wanted is not None:
        start, stop = partition(wanted, rank, size)
        own = stop - start
    numbered: Numbered
    if isinstance(rows, Stream):
        stream = rows.shuffled(seed) if shuffle else rows
        numbered = itertools.islice(_numbered(stream, preparation.name), rank, None, size)
    else:
        order = torch.arange(len(rows))
        if shuffle:
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        if size > 1 and has_same_rows_everywhere(rows, size):
            # The number of rows that fill a rank's pieces is unknown: each rank shares all rows.
            first = len(order) if packer or wanted is None else min(wanted, len(order))
            begin, end = partition(first, rank, size)
            # then this rank's share of the others, which replace rows that turn out to be empty
            order = torch.cat([order[begin:end], order[first:][rank::size]])
        numbered = _fetch_in_order(rows, order.tolist(), own)
    maker = SampleMaker(preparation)
    samples: list[Sample] = []
    while own is None or len(samples) < own:
        missing = _CHUNK if own is None or packer else own - len(samples)
        taken = list(itertools.islice(numbered, min(_CHUNK, missing)))
        if not taken:
            break
        samples += packer(maker(taken)) if packer else maker(taken)
    maker.report(len(samples), own, packed=packer is not None)
    return samples[:own]


def _fetch_in_order(rows: Rows, order: Sequence[int], wanted: int | None) -> Numbered:
    """Yield the rows in an order, read in chunks of at most ``wanted`` rows."""
    chunk = _CHUNK if wanted is None else max(1, min(_CHUNK, wanted))
    for start in range(0, len(order), chunk):
        indices = order[start : start + chunk]
        yield from zip(indices, rows.fetch(indices), strict=True)


def _numbered(stream: Iterable[Row], name: str) -> Numbered:
    """Number the rows of a stream, with exceptions turned into errors about the data."""
    try:
        yield from enumerate(stream)
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(f"{name} cannot be read on: {error!r}.", "Check it.") from error


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
        it, worker = self._preparation, get_worker_info()
        packer = Packer(it.max_length) if it.args.concatenate_data else None
        maker = SampleMaker(it)
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        numbered = itertools.islice(_numbered(self._rows, it.name), first, None, step)
        count = 0
        while taken := list(itertools.islice(numbered, _STREAM_CHUNK)):
            made: Iterable[Mapping[str, Any]] = packer(maker(taken)) if packer else maker(taken)
            for sample in made:
                count += 1
                self._given = max(self._given, count)
                yield dict(sample)
        if count or worker is not None:  # one of several workers may get no row
            return
        if not self._given:
            raise DatasetError(f"{it.name} has no samples.", "Give data that holds text.")
        raise DatasetError(
            f"{it.name} has ended after {self._given} samples, and cannot be read once more.",
            "Give a data set that can, or train for no more steps than it has samples for "
            "(max_train_samples takes them first).",
        )
