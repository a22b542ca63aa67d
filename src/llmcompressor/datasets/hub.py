# SPDX-License-Identifier: Apache-2.0
"""Adapters for the ``datasets`` library, imported only when needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import datasets
from datasets import Dataset, IterableDataset

from llmcompressor.datasets.rows import Row, Stream
from llmcompressor.errors import DatasetError

__all__ = [
    "HubRows",
    "HubStream",
    "dataset_of",
    "load_hub",
    "load_saved",
    "progress_bars_hidden",
    "resolve_files",
    "rows_by_split",
    "rows_of_frame",
    "rows_of_table",
]


class HubRows:
    """Rows of a ``datasets.Dataset``, decoded lazily."""

    def __init__(self, dataset: Dataset) -> None:
        # Transforms and tensors are kept, as the user chose them; other formats break rows.
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


def dataset_of(samples: Sequence[Mapping[str, Any]]) -> Dataset:
    """Convert samples to a ``Dataset``; a column that a sample lacks is ``None``."""
    columns = dict.fromkeys(name for sample in samples for name in sample)
    return Dataset.from_dict({name: [one.get(name) for one in samples] for name in columns})


def rows_of_table(table: Any) -> HubRows:
    """Rows of an Arrow table whose metadata describes images or audio."""
    return HubRows(Dataset(datasets.table.InMemoryTable(table)))


def rows_of_frame(frame: Any) -> HubRows:
    """Rows of a pandas data frame; missing values (NaN) become ``None``."""
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
        """Return the stream shuffled within a buffer."""
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
        DatasetError: it cannot be loaded, for any reason.
    """
    try:
        with progress_bars_hidden():
            return datasets.load_dataset(path, config, split=split, streaming=streaming, **options)
    except Exception as error:  # network, permission, split, configuration: all end here
        raise _cannot_load(path, config, error) from error


def _cannot_load(path: str, config: str | None, error: Exception) -> DatasetError:
    where = f" ({config})" if config else ""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return DatasetError(
        f"The data set {path}{where} cannot be loaded: {reason.rstrip('.')}.",
        "Check its name, configuration and split, and the network; or give a local copy "
        "with dataset_path.",
    )


def resolve_files(
    folder: str, config: str | None
) -> tuple[str, dict[str, list[str]], dict[str, Any]]:
    """Resolve the files of a local copy of a hub data set without building it.

    Args:
        folder: the local copy.
        config: the configuration, ``None`` for the default one.

    Returns:
        The loader (``"parquet"``, ``"json"``, …), the files by split, and reading options:
        ``field`` or ``delimiter``.

    Raises:
        DatasetError: there are no files, or no such configuration.
    """
    try:
        with (
            progress_bars_hidden(),
            TemporaryDirectory() as cache,
        ):  # a lock file is written even for reading
            builder = datasets.load_dataset_builder(folder, config, cache_dir=cache)
    except Exception as error:
        raise _cannot_load(folder, config, error) from error
    field, separator = (getattr(builder.config, name, None) for name in ("field", "sep"))
    options = {"field": field, "delimiter": separator if separator != "," else None}
    files = {str(name): list(several) for name, several in builder.config.data_files.items()}
    loader = type(builder).__module__.rpartition(".")[2]
    return loader, files, {name: value for name, value in options.items() if value is not None}


def rows_by_split(folder: str, config: str | None) -> dict[str, HubRows]:
    """Load a local copy of a hub data set with the library, as rows by split."""
    loaded = load_hub(folder, config=config, split=None, streaming=False, options={})
    return {str(name): HubRows(dataset) for name, dataset in loaded.items()}


def load_saved(path: str) -> Any:
    """Load a data set that ``save_to_disk`` wrote."""
    try:
        with progress_bars_hidden():
            return datasets.load_from_disk(path)
    except Exception as error:
        raise DatasetError(
            f"The saved data set {path} cannot be loaded: {error}.", "Check the folder."
        ) from error


@contextmanager
def progress_bars_hidden() -> Iterator[None]:
    """Disable the library's progress bars while the body runs."""
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
