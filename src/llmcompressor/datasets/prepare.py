# SPDX-License-Identifier: Apache-2.0
"""Preparation of samples: selection of rows, conversion and checks.

Rows are taken until there are enough samples, so that of a million rows only the needed ones are
read and tokenized. All work is done in one process, in sampling order: the same rows and seed give
the same samples for any number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from llmcompressor.datasets.making import SampleMaker
from llmcompressor.datasets.pack import Packer
from llmcompressor.datasets.preparation import Preparation
from llmcompressor.datasets.rows import Row, Rows, Stream
from llmcompressor.datasets.samples import Sample
from llmcompressor.datasets.sampling import draw_order, partition, same_everywhere, share, world
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

__all__ = ["Preparation", "guarded", "prepare_samples"]

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
    rank, size = world() if distributed else (0, 1)
    own = wanted
    if wanted is not None:
        start, stop = partition(wanted, rank, size)
        own = stop - start
    numbered: Iterator[tuple[int, Row]]
    if isinstance(rows, Stream):
        stream = rows.shuffled(seed) if shuffle else rows
        numbered = itertools.islice(enumerate(guarded(stream, preparation.name)), rank, None, size)
    else:
        order = draw_order(len(rows), shuffle=shuffle, seed=seed)
        if size > 1 and same_everywhere(rows, size):
            # The number of rows that fill a rank's pieces is unknown: each rank shares all rows.
            first = len(order) if packer or wanted is None else wanted
            order = share(order, first, rank, size)
        numbered = _numbered(rows, order.tolist(), own)
    return _collect(numbered, preparation, packer, own)


def _warn_of_limit(preparation: Preparation) -> None:
    asked, limit = preparation.args.max_seq_length, preparation.model_limit
    if asked is not None and limit is not None and asked > limit:
        logger.warning(
            f"max_seq_length is {asked}, and the model takes {limit} tokens: text is cut to "
            f"{limit} tokens."
        )


def _numbered(rows: Rows, order: Sequence[int], wanted: int | None) -> Iterator[tuple[int, Row]]:
    """Yield the rows in an order, read in chunks of at most ``wanted`` rows."""
    chunk = _CHUNK if wanted is None else max(1, min(_CHUNK, wanted))
    for start in range(0, len(order), chunk):
        indices = order[start : start + chunk]
        yield from zip(indices, rows.fetch(indices), strict=True)


def guarded(stream: Stream, name: str) -> Iterator[Row]:
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
