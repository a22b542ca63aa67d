# SPDX-License-Identifier: Apache-2.0
"""Lazy row access to raw data of any type.

A row is a dict from column to value. :class:`Rows` has a length and random access;
:class:`Stream` only yields rows in order.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from llmcompressor.errors import DatasetError
from llmcompressor.runtime.registry import LazyRegistry, normalize_name

__all__ = [
    "DATASETS",
    "Chain",
    "Columns",
    "Items",
    "Row",
    "Rows",
    "Slice",
    "Stream",
    "as_row",
    "find",
    "names",
    "register",
]

Row: TypeAlias = dict[str, Any]


@runtime_checkable
class Rows(Protocol):
    """Rows with a length and random access."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows at ``indices``, in that order, as new dicts."""
        ...


def as_row(item: Any, index: int) -> Row:
    """Convert an item of the user's data to a row.

    >>> as_row("some text", 0), as_row([1, 2], 0)
    ({'text': 'some text'}, {'input_ids': [1, 2]})
    """
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


class Items:
    """Rows of a sequence with a length and an index, such as a list or a torch data set."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        """Return the items at ``indices`` as rows."""
        return [as_row(self._item(index), index) for index in indices]

    def _item(self, index: int) -> Any:
        try:
            return self._items[index]
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(
                f"The data is a {type(self._items).__name__}, and its sample {index} cannot be "
                f"read: {error!r}.",
                "Give a Dataset, a list of rows, or anything that is indexed by a sample's number.",
            ) from error


def _describe(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


class Columns:
    """Rows of a mapping from column to values, such as a tokenizer's output for several texts.

    >>> Columns({"text": ["a", "b"], "prompt": ["", "b"]}).fetch([1])
    [{'text': 'b', 'prompt': 'b'}]
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = dict(columns)
        for name, values in self._columns.items():
            if not hasattr(values, "__len__"):
                raise DatasetError(
                    f"The column {name!r} of the data is {_describe(values)}, and no list of "
                    "values.",
                    "Give each column one value for every sample.",
                )
        lengths = {name: len(values) for name, values in self._columns.items()}
        if len(set(lengths.values())) > 1:
            each = ", ".join(f"{name} has {count}" for name, count in lengths.items())
            raise DatasetError(
                f"The columns of the data differ in length: {each}.",
                "Give each column one value for every sample.",
            )
        self._count = max(lengths.values(), default=0)

    def __len__(self) -> int:
        return self._count

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        """Return the values of all columns at ``indices``."""
        return [
            {name: values[index] for name, values in self._columns.items()} for index in indices
        ]


class Slice:
    """A contiguous range of other rows."""

    def __init__(self, rows: Rows, start: int, stop: int) -> None:
        self._rows, self._range = rows, range(start, max(start, stop))

    def __len__(self) -> int:
        return len(self._range)

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows at ``indices``, counted from the start of the slice."""
        return self._rows.fetch([self._range[index] for index in indices])


class Chain:
    """Concatenation of several sources of rows."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = list(parts)
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def fetch(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows at ``indices``, counted through all parts."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for position, index in enumerate(indices):
            part = bisect.bisect_right(self._ends, index)
            begin = self._ends[part - 1] if part else 0
            wanted.setdefault(part, []).append((position, index - begin))
        fetched: dict[int, Row] = {}
        for part, places in wanted.items():
            rows = self._parts[part].fetch([index for _, index in places])
            fetched.update(zip((position for position, _ in places), rows, strict=True))
        return [fetched[position] for position in range(len(indices))]


class _IterableSlice:
    """A contiguous range of items that can be iterated repeatedly."""

    def __init__(self, items: Iterable[Any], start: int, stop: int | None) -> None:
        self._items, self._start, self._stop = items, start, stop

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._items, self._start, self._stop)


class Stream:
    """Rows of unknown number that are read in order."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Row]:
        for index, item in enumerate(self._items):
            yield as_row(item, index)

    def cut(self, start: int, stop: int | None) -> Stream:
        """The rows from ``start`` on, up to but not including ``stop``."""
        return Stream(_IterableSlice(self, start, stop))

    def shuffled(self, seed: int) -> Stream:
        """Return the stream itself, as a plain iterator cannot be shuffled."""
        del seed
        return self


# --------------------
# Registry of named data sets, whose classes are imported lazily.

_NAMED = "llmcompressor.datasets.named"

DATASETS = LazyRegistry(
    "data set",
    {
        "c4": f"{_NAMED}:C4",
        "cnn_dailymail": f"{_NAMED}:CNNDailyMail",
        "evolcodealpaca": f"{_NAMED}:EvolCodeAlpaca",
        "flickr30k": f"{_NAMED}:Flickr30k",
        "gsm8k": f"{_NAMED}:GSM8K",
        "open_platypus": f"{_NAMED}:OpenPlatypus",
        "peoples_speech": f"{_NAMED}:PeoplesSpeech",
        "perfectblend": f"{_NAMED}:PerfectBlend",
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
