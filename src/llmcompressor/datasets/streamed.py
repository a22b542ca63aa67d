# SPDX-License-Identifier: Apache-2.0
"""Training samples of a stream, prepared lazily."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch.utils.data import IterableDataset, get_worker_info

from llmcompressor.datasets.making import SampleMaker
from llmcompressor.datasets.pack import Packer
from llmcompressor.datasets.preparation import Preparation
from llmcompressor.datasets.prepare import guarded
from llmcompressor.datasets.rows import Row, Stream
from llmcompressor.datasets.samples import Sample
from llmcompressor.errors import DatasetError

__all__ = ["StreamedSamples"]

_CHUNK = 16


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
        rows_of_all = enumerate(guarded(self._rows, self._preparation.name))
        numbered = itertools.islice(rows_of_all, first, None, step)
        count = 0
        while rows := list(itertools.islice(numbered, _CHUNK)):
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
