# SPDX-License-Identifier: Apache-2.0
"""Lazy row access to data of any type, and the registry of named data sets.

A row is a dict from column to value. :class:`Rows` has a length and random access;
:class:`Stream` only yields rows in order.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from llmcompressor.datasets.samples import MAIN_INPUTS
from llmcompressor.errors import DatasetError
from llmcompressor.runtime.registry import LazyRegistry, normalize_name, resolve

Row: TypeAlias = dict[str, Any]


class Rows:
    """Rows with a length and random access.

    Args:
        count: number of rows.
        read: returns the rows at the given indices, in that order, as new dicts.
    """

    def __init__(self, count: int, read: Callable[[Sequence[int]], list[Row]]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows at ``indices``, in that order."""
        return self._read(indices) if len(indices) else []

    def cut(self, start: int, stop: int | None) -> Rows:
        """Return the rows from ``start`` on, up to but not including ``stop``."""
        kept = range(self._count)[start:stop]
        return Rows(len(kept), lambda indices: self._read([kept[index] for index in indices]))


def join(parts: Sequence[Rows]) -> Rows:
    """Concatenate several sources of rows."""
    ends = list(itertools.accumulate(map(len, parts)))

    def read(indices: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for index in indices:
            part = bisect.bisect_right(ends, index)
            rows += parts[part].fetch([index - (ends[part] - len(parts[part]))])
        return rows

    return Rows(ends[-1], read)


class Stream:
    """Rows of unknown number that are read in order.

    Args:
        items: an iterable of the user's, or a ``datasets.IterableDataset``.
        start: items to skip.
        stop: the first item that is not read.
    """

    def __init__(self, items: Iterable[Any], start: int = 0, stop: int | None = None) -> None:
        self._items: Any = items
        self._start, self._stop = start, stop

    def __iter__(self) -> Iterator[Row]:
        items = _examples(self._items) if self._is_of_library else self._items
        for index, item in itertools.islice(enumerate(items), self._start, self._stop):
            yield _as_row(item, index)

    @property
    def _is_of_library(self) -> bool:
        return is_a(self._items, "datasets", "IterableDataset")

    def cut(self, start: int, stop: int | None) -> Stream:
        """Return the rows from ``start`` on, up to but not including ``stop``."""
        if not self._is_of_library:
            return Stream(self, start, stop)
        skipped = self._items.skip(start) if start else self._items
        return Stream(skipped if stop is None else skipped.take(max(0, stop - start)))

    def shuffled(self, seed: int) -> Stream:
        """Shuffle a stream of the library within a buffer; a plain iterator keeps its order."""
        return Stream(self._items.shuffle(seed=seed)) if self._is_of_library else self


def _examples(dataset: Any) -> Iterator[Row]:
    """All rows of a stream of the library, in their order.

    Iterated as it is in a worker of a ``DataLoader``, it would give a share of its shards alone.
    """
    for batch in dataset.with_format(None).iter(batch_size=1):
        yield {name: values[0] for name, values in batch.items()}


def _as_row(item: Any, index: int) -> Row:
    """Convert an item of the user's data to a row.

    >>> _as_row("some text", 0), _as_row([1, 2], 0)
    ({'text': 'some text'}, {'input_ids': [1, 2]})
    """
    item = _value(item)
    if isinstance(item, str):
        return {"text": item}
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, tuple) and len(item) == 1:  # a TensorDataset's item
        return {"input_ids": item[0]}
    if hasattr(item, "tolist") or (
        isinstance(item, (list, tuple)) and all(isinstance(token, int) for token in item)
    ):
        return {"input_ids": item}
    raise DatasetError(
        f"Sample {index} of the data is a {type(item).__name__}.",
        "Give strings, dicts, or sequences of token ids.",
    )


_TABLES = (
    ("pandas", "DataFrame"),
    ("pyarrow", "Table"),
    ("pyarrow", "RecordBatch"),
    ("datasets", "Dataset"),
)


def rows_of(data: Any) -> Rows | Stream:
    """Adapt a data object that has no splits to rows.

    Raises:
        DatasetError: the object has no rows.
    """
    if isinstance(data, Rows | Stream):
        return data
    if isinstance(data, Mapping):
        return _rows_of_sequence([dict(data)]) if _is_one_row(data) else rows_of_columns(data)
    if is_a(data, "pyarrow", "RecordBatchReader"):
        return Stream(row for batch in data for row in batch.to_pylist())
    is_batches = isinstance(data, list) and bool(data) and is_a(data[0], "pyarrow", "RecordBatch")
    is_frame = hasattr(data, "__arrow_c_stream__") and hasattr(data, "columns")
    if is_batches or is_frame or any(is_a(data, *one) for one in _TABLES):
        return _rows_of_dataset(resolve("llmcompressor.datasets.hub:dataset_of_table")(data))
    is_class = isinstance(data, type)
    is_stream = is_a(data, "torch.utils.data", "IterableDataset") or is_a(
        data, "datasets", "IterableDataset"
    )
    if not (is_class or is_stream) and hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        if getattr(data, "ndim", None) == 0:
            raise DatasetError("The data is a single number.", "Give a row for each sample.")
        return _rows_of_sequence(data)
    if not is_class and hasattr(data, "__iter__"):
        return Stream(data)
    remedy = "Give a Dataset, a DataLoader, a list, a path or a name."
    if callable(data) and hasattr(data, "__name__"):
        call = f", as in dataset={data.__name__}()" if data.__name__.isidentifier() else ""
        remedy = f"Give {'an object of it' if is_class else 'what it returns'}{call}."
    raise DatasetError(f"The data is a {type(data).__name__}, which has no rows.", remedy)


def _value(held: Any) -> Any:
    """Return what an Arrow scalar holds; other values are returned themselves."""
    return held.as_py() if hasattr(held, "as_py") else held


def _rows_of_sequence(items: Any) -> Rows:
    """Rows of anything with a length and an index, such as a list or a torch data set."""

    def item(index: int) -> Any:
        try:
            return items[index]
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(
                f"The data is a {type(items).__name__}, and its sample {index} cannot be "
                f"read: {error!r}.",
                "Give a Dataset, a list of rows, or anything that is indexed by a sample's number.",
            ) from error

    return Rows(len(items), lambda indices: [_as_row(item(index), index) for index in indices])


def _rows_of_dataset(dataset: Any) -> Rows:
    """Rows of a ``datasets.Dataset``, decoded lazily."""
    # Transforms and tensors are kept, as the user chose them; other formats break rows.
    kept = dataset.format["type"] in ("custom", "numpy", "torch")
    plain = dataset if kept else dataset.with_format(None)

    def read(indices: Sequence[int]) -> list[Row]:
        columns = plain[list(indices)]
        return [{name: columns[name][at] for name in columns} for at in range(len(indices))]

    return Rows(len(plain), read)


def rows_of_columns(columns: Mapping[str, Any]) -> Rows:
    """Rows of a mapping from column to values, such as a tokenizer's output for several texts.

    >>> rows_of_columns({"text": ["a", "b"], "prompt": ["", "b"]}).fetch([1])
    [{'text': 'b', 'prompt': 'b'}]
    """
    remedy = "Give each column one value for every sample."
    for name, values in columns.items():
        if not hasattr(values, "__len__"):
            kind = "None" if values is None else f"of type {type(values).__name__}"
            raise DatasetError(
                f"The column {name!r} of the data is {kind}, and no list of values.", remedy
            )
    counts = {name: len(values) for name, values in columns.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise DatasetError(f"The columns of the data differ in length: {each}.", remedy)
    return Rows(
        max(counts.values(), default=0),
        lambda indices: [
            {name: _value(values[index]) for name, values in columns.items()} for index in indices
        ],
    )


_CHATS = ("chosen", "completion", "conversations", "messages", "prompt")
_TEXTS = ("chosen", "completion", "prompt", "text")
_COLUMNS = MAIN_INPUTS.union(_CHATS, _TEXTS)
"""A mapping with one of these for a key holds columns; any other holds splits."""


def has_columns(data: Mapping[str, Any]) -> bool:
    """Return True if a mapping holds columns instead of splits."""
    found = [data[name] for name in _COLUMNS & data.keys()]
    return bool(found) and not any(hasattr(each, "column_names") for each in found)


def _is_one_row(data: Mapping[str, Any]) -> bool:
    """Return True if a mapping is a single row: a text, a conversation or token ids."""
    if any(is_chat(data.get(name)) for name in _CHATS):
        return True
    ids = data.get("input_ids")
    first = None if ids is None else _value(next(iter(ids), None))
    is_token = isinstance(first, int) or getattr(first, "ndim", None) == 0
    return is_token or any(isinstance(data.get(name), str) for name in _TEXTS)


def is_chat(value: Any) -> bool:
    """Return True for a list of turns with ``role`` and ``content``, or ``from`` and ``value``.

    A turn that calls tools may have no ``content``, but at least one turn must have some.

    >>> is_chat([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "tool_calls": []}])
    True
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    if not all(isinstance(turn, Mapping) and turn.keys() & {"role", "from"} for turn in value):
        return False
    return any(turn.keys() & {"content", "from"} for turn in value)


def is_a(data: Any, package: str, name: str) -> bool:
    """Like isinstance, but by class name, without importing the class's library."""
    return any(
        cls.__name__ == name and (cls.__module__ + ".").startswith(package + ".")
        for cls in type(data).__mro__
    )


# --------------------
# Registry of named data sets, whose classes are imported lazily.

_NAMED = "llmcompressor.datasets.named"

DATASETS = LazyRegistry(
    "data set",
    {
        "c4": f"{_NAMED}:C4",
        "cnn_dailymail": f"{_NAMED}:CNNDailyMail",
        "default": "llmcompressor.datasets.default_mix:DefaultMix",
        "evolcodealpaca": f"{_NAMED}:EvolCodeAlpaca",
        "flickr30k": f"{_NAMED}:Flickr30k",
        "gsm8k": f"{_NAMED}:GSM8K",
        "open_platypus": f"{_NAMED}:OpenPlatypus",
        "peoples_speech": f"{_NAMED}:PeoplesSpeech",
        "perfectblend": f"{_NAMED}:PerfectBlend",
        "python_stdlib": "llmcompressor.datasets.default_mix:StandardLibraryText",
        "ultrachat_200k": f"{_NAMED}:UltraChat",
        "wikitext": f"{_NAMED}:WikiText",
    },
)

_ALSO = {
    "abisee/cnn_dailymail": "cnn_dailymail",
    "allenai/c4": "c4",
    "flickr": "flickr30k",
    "garage_baind/open_platypus": "open_platypus",
    "huggingfaceh4/ultrachat_200k": "ultrachat_200k",
    "lmms_lab/flickr30k": "flickr30k",
    "mlabonne/open_perfectblend": "perfectblend",
    "mlcommons/peoples_speech": "peoples_speech",
    "open_perfectblend": "perfectblend",
    "openai/gsm8k": "gsm8k",
    "salesforce/wikitext": "wikitext",
    "theblackcat102/evol_codealpaca_v1": "evolcodealpaca",
    "ultrachat": "ultrachat_200k",
}
"""Other names, folded: the data sets' own on the hub among them."""

_registered: dict[str, str] = {}


def register(name: str, cls: Any) -> None:
    """Register a third party's class as ``name``; it takes precedence over a built-in one."""
    DATASETS.add(name, cls)
    _registered[normalize_name(name)] = name


def names() -> list[str]:
    """All names that :func:`find` accepts, without aliases."""
    return sorted({*DATASETS, *_registered.values()})


def find(name: str) -> Any | None:
    """Return the class of a data set by any of its names, or ``None``."""
    folded = normalize_name(name)
    if folded not in _registered:
        folded = _ALSO.get(folded, folded)
        if folded not in DATASETS:
            return None
    return DATASETS.load(folded)
