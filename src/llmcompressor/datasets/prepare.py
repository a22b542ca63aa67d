# SPDX-License-Identifier: Apache-2.0
"""Preparation of samples: selection of rows, conversion and checks.

Rows are taken until there are enough samples, so that of a million rows only the needed ones are
read and tokenized. All work is done in one process, in sampling order: the same rows and seed give
the same samples for any number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch.utils.data import IterableDataset, get_worker_info

from llmcompressor.datasets.rows import Row, Rows, Stream
from llmcompressor.datasets.samples import Sample
from llmcompressor.datasets.sampling import (
    draw_order,
    has_same_rows_everywhere,
    partition,
    rank_and_world_size,
    rank_order,
)
from llmcompressor.datasets.tokenize import Packer, Preparation, SampleMaker
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

__all__ = ["Preparation", "StreamedSamples", "iterate_stream", "prepare_samples"]

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
        if not count and worker is None:  # one of several workers may get no row
            self._refuse_end()

    def _refuse_end(self) -> None:
        name = self._preparation.name
        if not self._given:
            raise DatasetError(f"{name} has no samples.", "Give data that holds text.")
        raise DatasetError(
            f"{name} has ended after {self._given} samples, and cannot be read once more.",
            "Give a data set that can, or train for no more steps than it has samples for "
            "(max_train_samples takes them first).",
        )
