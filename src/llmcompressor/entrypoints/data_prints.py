# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of data sets, computed without preparing them.

==================================  ===============================================================
a name of a data set, or on the hub the name
a path                              size and hash of each file: of all its bytes up to 64 MiB, else
                                    of 256 windows of 64 KiB that lie evenly over it
a ``datasets.Dataset``              the fingerprint that the library keeps of it
a list, a mapping, a data frame     a hash of its values, down to tensors and images
anything else                       its class, and its length if it has one
==================================  ===============================================================

The last kind are generators, streams, loaders and custom classes: reading them could exhaust them,
or yield other values each time.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from llmcompressor.checkpoint.reading import bytes_of
from llmcompressor.datasets import table
from llmcompressor.datasets.source import KIND_NAMES
from llmcompressor.entrypoints.sampled import DATA, file_print
from llmcompressor.registry import fold

__all__ = ["data_print", "kind_print", "path_print", "values_print"]


def data_print(data: Any) -> Any:
    """Return the fingerprint of a data set as a JSON value.

    Args:
        data: any value of the argument ``dataset`` or ``dataset_path``.
    """
    if data is None:
        return None
    if isinstance(data, str | os.PathLike):
        name = os.fspath(data)
        known = table.find(name) is not None or fold(name) in KIND_NAMES
        return name if known or not Path(name).expanduser().exists() else path_print(name)
    if isinstance(data, Mapping) and all(isinstance(name, str) for name in data):
        return {
            name: values_print(each) if _is_value(each) else data_print(each)
            for name, each in data.items()
        }
    return values_print(data) if _is_value(data) else kind_print(data)


def path_print(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fingerprint of a path: ``path`` as given and, if it exists, ``files`` with size and hash."""
    given, place = os.fspath(path), Path(path).expanduser()
    if place.is_file():
        return {"path": given, "files": file_print(place, DATA)}
    if not place.is_dir():
        return {"path": given}
    digest, count = xxhash.xxh3_128(), 0
    for file in sorted(one for one in place.rglob("*") if one.is_file()):
        count += 1
        digest.update(f"{file.relative_to(place)} {file_print(file, DATA)}\n".encode())
    return {"path": given, "files": f"{count} files, {digest.hexdigest()}"}


def values_print(values: Any) -> str:
    """Fingerprint of values: their type, number and a hash of all of them."""
    digest = xxhash.xxh3_128()
    _update(digest, values)
    size = f" of {len(values)}" if hasattr(values, "__len__") else ""
    return f"{type(values).__name__}{size}, {digest.hexdigest()}"


def kind_print(value: Any) -> str:
    """Fingerprint of an object without reading it: class, length, and that of ``datasets``."""
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size} {getattr(value, '_fingerprint', '')}".strip()


def _is_value(data: Any) -> bool:
    """Return True if all values are in memory, so that reading them has no side effect."""
    return isinstance(data, str | list | tuple | Tensor | np.ndarray) or _is_frame(data)


def _is_frame(data: Any) -> bool:
    of_pandas = f"{type(data).__module__}.".startswith("pandas.")
    return of_pandas and hasattr(data, "to_dict")


def _update(digest: xxhash.xxh3_128, value: Any) -> None:
    """Add a value to a hash, with type and length so that adjacent values stay distinct."""
    if isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        digest.update(bytes_of(value.detach().cpu().contiguous()))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"array {value.dtype} {value.shape};".encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, list | tuple | np.ndarray):
        _update_with_items(digest, value)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for name, each in value.items():
            _update(digest, name)
            _update(digest, each)
    elif _is_frame(value):
        _update(digest, value.to_dict("list"))
    elif isinstance(value, str | bytes):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        digest.update(f"{type(value).__name__} {len(text)};".encode())
        digest.update(text)
    elif value is None or isinstance(value, bool | int | float | np.generic):
        digest.update(f"{value!r};".encode())
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # an image
        digest.update(f"image {value.mode} {value.size};".encode())
        digest.update(value.tobytes())
    else:
        digest.update(f"{kind_print(value)};".encode())


def _update_with_items(digest: xxhash.xxh3_128, items: Any) -> None:
    digest.update(f"list {len(items)};".encode())
    if len(items) and type(items[0]) is int:
        try:
            digest.update(array("q", items).tobytes())  # token ids: most of a data set
        except (TypeError, OverflowError):
            pass
        else:
            return
    for each in items:
        _update(digest, each)
