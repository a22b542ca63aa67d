# SPDX-License-Identifier: Apache-2.0
"""Training samples of a stream: made when they are asked for, since nobody knows how many come."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch.utils.data import IterableDataset, get_worker_info

from llmcompressor.datasets.making import SampleMaker
from llmcompressor.datasets.pack import Packer
from llmcompressor.datasets.preparation import Preparation
from llmcompressor.datasets.rows import Row, Stream
from llmcompressor.datasets.samples import Sample

__all__ = ["StreamedSamples"]

_CHUNK = 16


class StreamedSamples(IterableDataset[Sample]):
    """The samples of a stream, in its order, from the beginning each time that it is iterated.

    Where several workers make batches, each makes the samples of every n-th row.

    Args:
        rows: the raw data.
        preparation: what is made of each row.
    """

    def __init__(self, rows: Stream, preparation: Preparation) -> None:
        self._rows = rows
        self._preparation = preparation

    def __iter__(self) -> Iterator[Sample]:
        args = self._preparation.args
        packer = Packer(self._preparation.max_length) if args.concatenate_data else None
        prepare = SampleMaker(self._preparation)
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        numbered: Iterator[tuple[int, Row]]
        numbered = itertools.islice(enumerate(self._rows), first, None, step)
        while rows := list(itertools.islice(numbered, _CHUNK)):
            made = prepare(rows)
            yield from packer(made) if packer else made
