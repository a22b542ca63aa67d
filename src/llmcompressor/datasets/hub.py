# SPDX-License-Identifier: Apache-2.0
"""Loading of files and of data sets of the hub with the ``datasets`` library.

Imported only when needed. Of local files nothing stays on the disk: the library's cache is a
temporary directory that is removed once its files are mapped into memory.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset

from llmcompressor.errors import DatasetError


def dataset_of(samples: Sequence[Mapping[str, Any]]) -> Dataset:
    """Convert samples to a ``Dataset``; a column that a sample lacks is ``None``."""
    columns = dict.fromkeys(name for sample in samples for name in sample)
    return Dataset.from_dict({name: [one.get(name) for one in samples] for name in columns})


def dataset_of_table(data: Any) -> Dataset:
    """Convert what is a table to a ``Dataset`` whose rows can be read.

    Args:
        data: a table or record batch of Arrow, a list of batches, a pandas data frame, a
            ``Dataset``, or what offers its columns by Arrow's stream interface, as data frames of
            other libraries do.

    Returns:
        The data; missing values of a pandas data frame (NaN) are ``None``. A ``Dataset`` whose
        types can be read is returned itself.

    Raises:
        DatasetError: it cannot be converted, or two columns have one name.
    """
    if isinstance(data, Dataset):
        table = data.data.table
        if not _is_unusual(table.schema):
            return data
        held = datasets.table.InMemoryTable(_plain_table(table))
        # rows that were chosen before stay chosen
        return Dataset(held, split=data.split, indices_table=data._indices)
    try:
        if isinstance(data, pa.RecordBatch | list):
            data = pa.Table.from_batches(data if isinstance(data, list) else [data])
        elif not isinstance(data, pa.Table) and not hasattr(data, "iloc"):
            data = pa.table(data)
        if isinstance(data, pa.Table):
            return Dataset(datasets.table.InMemoryTable(_plain_table(data)))
    except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"The table cannot be read: {' '.join(str(error).split()):.300}.",
            "Give each column a name of its own and a type that Parquet has.",
        ) from error
    try:
        return Dataset.from_pandas(data, preserve_index=False)
    except Exception as error:  # values of several types in one column, and so on
        raise DatasetError(
            f"The data frame cannot be read: {error}.", 'Give frame.to_dict("records") instead.'
        ) from error


def _is_unusual(schema: pa.Schema) -> bool:
    return any(_plain_type(one.type) != one.type for one in schema)


def _plain_table(table: pa.Table) -> pa.Table:
    """Return a table of plain types: itself, or with the columns that are of others converted."""
    for place, field in enumerate(table.schema):
        kind = _plain_type(field.type)
        if kind != field.type:
            values = [pa.array(one.to_pylist(), kind) for one in table.column(place).chunks]
            column = pa.chunked_array(values, kind)
            table = table.set_column(place, field.with_type(kind), column)
    return table


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return a type without views and run-end encoding, of which no row can be taken everywhere."""
    for matches, plain in ((_IS_STRING_VIEW, pa.large_string()), (_IS_BINARY, pa.large_binary())):
        if matches(kind):
            return plain
    if pa.types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_plain_type(one.type)) for one in kind])
    if any(matches(kind) for matches in _LISTS):
        inner = _plain_type(kind.value_type)
        is_view = any(matches(kind) for matches in _LIST_VIEWS)
        return pa.large_list(inner) if is_view or inner != kind.value_type else kind
    return kind


_IS_STRING_VIEW, _IS_BINARY = pa.types.is_string_view, pa.types.is_binary_view
_LIST_VIEWS = (pa.types.is_list_view, pa.types.is_large_list_view)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, *_LIST_VIEWS)


@contextmanager
def _without_bars() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Make a ``DatasetError`` of whatever fails: the network, a split, a configuration."""
    try:
        with _without_bars():
            yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DatasetError(
            f"The data set {what} cannot be loaded: {reason.rstrip('.')}.",
            "Check its name, configuration and split, and the network; or give a local copy "
            "with dataset_path.",
        ) from error


def load_hub(path: str, *, config: str | None, **options: Any) -> Any:
    """Load a data set from the hub (or a loader of the library's, such as ``"json"``).

    Raises:
        DatasetError: it cannot be loaded, for any reason.
    """
    with _loading(f"{path} ({config})" if config else path):
        return datasets.load_dataset(path, config, **options)


def load_saved(path: str) -> Any:
    """Load a data set that ``save_to_disk`` wrote."""
    with _loading(path):
        return datasets.load_from_disk(path)


@contextmanager
def _offline() -> Iterator[str]:
    """Read local files quietly, without the request that counts downloads; yields a cache."""
    counted, logs = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS, datasets.logging.get_verbosity()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        with _without_bars(), TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            yield cache
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counted
        datasets.logging.set_verbosity(logs)


def load_files(
    loader: str,
    files: Sequence[Path],
    *,
    text_columns: Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Load local files, in their order, with a loader of the library's.

    Args:
        loader: "csv", "json", "parquet", "text" or another of the library's loaders.
        files: the files, which may be packed.
        text_columns: all columns, if their cells are text even where they look like numbers.
        options: options of the loader.

    Returns:
        A ``Dataset``; an empty list if there are no rows.

    Raises:
        OSError, ValueError: the cause of the library's failure.
    """
    if text_columns is not None:
        text = datasets.Value("string")
        options["features"] = datasets.Features(dict.fromkeys(text_columns, text))
    is_parquet = loader == "parquet" and all(file.suffix == ".parquet" for file in files)
    if is_parquet and any(_is_unusual(pyarrow.parquet.read_schema(file)) for file in files):
        tables = [_plain_table(pyarrow.parquet.read_table(file)) for file in files]
        return dataset_of_table(pa.concat_tables(tables))
    places = [glob.escape(str(file)) for file in files]
    with _offline() as cache:
        builder = datasets.load_dataset_builder(
            loader, data_files=places, cache_dir=cache, **options
        )
        try:
            builder.download_and_prepare()
        except datasets.exceptions.DatasetGenerationError as error:
            raise (error.__cause__ or error) from None
        is_empty = not builder.info.splits["train"].num_examples
        return [] if is_empty else builder.as_dataset("train")


def resolve_card(
    folder: Path, config: str | None
) -> tuple[str, dict[str, list[Path]], dict[str, Any]]:
    """Resolve what the card of a local copy of a hub data set says, without reading the data.

    Args:
        folder: the local copy.
        config: the configuration, ``None`` for the default one.

    Returns:
        The loader (``"parquet"``, ``"json"``, …), the files by split, and reading options:
        ``field`` or ``delimiter``.

    Raises:
        DatasetError: there are no files, or no such configuration.
    """
    what = f"{folder} ({config})" if config else str(folder)
    with _loading(what), _offline() as cache:  # a lock file is written even for reading
        builder = datasets.load_dataset_builder(str(folder), config, cache_dir=cache)
    field, separator = (getattr(builder.config, name, None) for name in ("field", "sep"))
    options = {"field": field, "delimiter": separator if separator != "," else None}
    files = {
        str(name): [Path(file) for file in several]
        for name, several in builder.config.data_files.items()
    }
    loader = type(builder).__module__.rpartition(".")[2]
    return loader, files, {name: value for name, value in options.items() if value is not None}
