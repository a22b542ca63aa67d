# SPDX-License-Identifier: Apache-2.0
"""All that touches the ``datasets`` library; imported only for data that needs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
from datasets import Dataset, IterableDataset

from llmcompressor.datasets.rows import Row, Stream
from llmcompressor.errors import DatasetError

__all__ = [
    "HubRows",
    "HubStream",
    "load_hub",
    "load_saved",
    "quiet",
    "rows_of_frame",
    "rows_of_table",
]


class HubRows:
    """Rows of a ``datasets.Dataset``, decoded only when they are asked for."""

    def __init__(self, dataset: Dataset) -> None:
        # A transform and tensors are what the user wants; a data frame is no column of rows.
        kept = dataset.format["type"] in ("custom", "numpy", "torch")
        self._dataset = dataset if kept else dataset.with_format(None)

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        """The rows at ``indices``."""
        if not len(indices):
            return []
        columns = self._dataset[list(indices)]
        return [{name: columns[name][at] for name in columns} for at in range(len(indices))]


def rows_of_table(table: Any) -> HubRows:
    """Rows of an Arrow table whose metadata describes images or audio."""
    return HubRows(Dataset(datasets.table.InMemoryTable(table)))


def rows_of_frame(frame: Any) -> HubRows:
    """Rows of a pandas data frame; what it lacks (NaN) is ``None``."""
    try:
        return HubRows(Dataset.from_pandas(frame, preserve_index=False))
    except Exception as error:  # values of several types in one column, and so on
        raise DatasetError(
            f"The data frame cannot be read: {error}.", 'Give frame.to_dict("records") instead.'
        ) from error


class HubStream(Stream):
    """Rows of a ``datasets.IterableDataset``."""

    def __init__(self, dataset: IterableDataset) -> None:
        super().__init__(dataset)
        self._dataset = dataset

    def cut(self, start: int, stop: int | None) -> HubStream:
        """The rows from ``start`` on, up to but not including ``stop``."""
        skipped = self._dataset.skip(start) if start else self._dataset
        return HubStream(skipped if stop is None else skipped.take(max(0, stop - start)))

    def shuffled(self, seed: int) -> HubStream:
        """The rows in another order, as far as a buffer of them allows."""
        return HubStream(self._dataset.shuffle(seed=seed))


def load_hub(
    path: str,
    *,
    config: str | None,
    split: str | None,
    streaming: bool,
    options: Mapping[str, Any],
) -> Any:
    """Load a data set from the hub (or a loader of the library's, such as ``"json"``).

    Raises:
        DatasetError: if it cannot be had, whatever the reason.
    """
    where = f" ({config})" if config else ""
    try:
        with quiet():
            return datasets.load_dataset(path, config, split=split, streaming=streaming, **options)
    except Exception as error:  # network, permission, split, configuration: all end here
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DatasetError(
            f"The data set {path}{where} cannot be loaded: {reason.rstrip('.')}.",
            "Check its name, configuration and split, and the network; or give a local copy "
            "with dataset_path.",
        ) from error


def load_saved(path: str) -> Any:
    """Load what ``save_to_disk`` wrote."""
    try:
        with quiet():
            return datasets.load_from_disk(path)
    except Exception as error:
        raise DatasetError(
            f"The saved data set {path} cannot be loaded: {error}.", "Check the folder."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's progress bars; whether they were on is restored."""
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
