# SPDX-License-Identifier: Apache-2.0
"""Raw rows → samples: which are taken, what is made of each, and what is refused.

Rows are taken until there are enough samples, so that of a million rows only those that are
needed are read and tokenized. Work is done here in one process, in the order of the sampling:
the same rows and seed give the same samples, whatever the number of workers.
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
        preparation: what is made of each row.
        wanted: samples to return, of all processes together; ``None`` for all there are.
        shuffle: take rows in random order, none twice.
        seed: decides that order.
        distributed: where there are several processes, return only this one's part.

    Returns:
        The samples; fewer than ``wanted`` (with a warning) if there are not so many.

    Raises:
        DatasetError: for a row that cannot be used, and if no sample is left.
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
            # How many rows fill a rank's pieces is not known before: each gets its share of all.
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
    """The rows in an order, read in chunks and never more than wanted ahead."""
    chunk = _CHUNK if wanted is None else max(1, min(_CHUNK, wanted))
    for start in range(0, len(order), chunk):
        indices = order[start : start + chunk]
        yield from zip(indices, rows.fetch(indices), strict=True)


def guarded(stream: Stream, name: str) -> Iterator[Row]:
    """The rows of a stream; what fails while reading it is an error of the data.

    Raises:
        DatasetError: says of which data.
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
