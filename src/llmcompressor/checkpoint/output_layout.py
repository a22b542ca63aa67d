# SPDX-License-Identifier: Apache-2.0
"""Layout of the output files, computed before any tensor.

A safetensors file begins with a header that places all its tensors. As names, dtypes and shapes
follow from the model and its schemes, the files are laid out first. Blocks are then written to
their places in any order, a killed run resumes, and the size of the output is known to the byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from llmcompressor.checkpoint.reading import DTYPES
from llmcompressor.checkpoint.source import INDEX, SINGLE

__all__ = ["OutputFile", "OutputLayout", "Place", "Stored", "lay_out"]

_ALIGNMENT = 8
# The order of safetensors: wide dtypes first, so that every tensor is aligned to its dtype.
_ORDER = [
    "BOOL",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "F8_E8M0",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
]


@lru_cache(maxsize=4096)
def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * DTYPES[dtype].itemsize


class Stored(NamedTuple):
    """The name, dtype and shape of a stored tensor."""

    name: str
    dtype: str
    """safetensors' name of the dtype."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor's data."""
        return _bytes(self.dtype, self.shape)


class Place(NamedTuple):
    """The place of a stored tensor in a file."""

    file: str
    offset: int
    """Bytes from the beginning of the file."""
    stored: Stored


@dataclass(frozen=True)
class OutputFile:
    """A weight file of the output.

    Attributes:
        name: its name.
        header: the safetensors header, including its length.
        size: bytes of the whole file.
    """

    name: str
    header: bytes
    size: int


@dataclass(frozen=True)
class OutputLayout:
    """The layout of all weight files.

    Attributes:
        files: in order.
        places: tensor → its place.
        total_size: bytes of all tensors.
    """

    files: Sequence[OutputFile]
    places: Mapping[str, Place]
    total_size: int

    @property
    def file_size(self) -> int:
        """Number of bytes of all weight files."""
        return sum(file.size for file in self.files)

    def index(self) -> str | None:
        """Return the text of the index file; ``None`` for a single weight file."""
        if len(self.files) == 1:
            return None
        index = {
            "metadata": {"total_size": self.total_size},
            "weight_map": {name: place.file for name, place in self.places.items()},
        }
        return json.dumps(index, indent=2, sort_keys=True) + "\n"

    @property
    def index_name(self) -> str:
        """The name of the index file."""
        return INDEX


def lay_out(tensors: Iterable[Stored], limit: int) -> OutputLayout:
    """Divide tensors into files in their order, and place them.

    Args:
        tensors: the tensors in the order to store them.
        limit: bytes of tensors per file; a single larger one gets a file of its own.
    """
    groups: list[list[Stored]] = [[]]
    held = total = 0
    for stored in tensors:
        size = stored.nbytes
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(stored)
        held += size
        total += size
    files: list[OutputFile] = []
    places: dict[str, Place] = {}
    for number, group in enumerate(groups, start=1):
        name = (
            SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        header, offsets, size = _header(group)
        begin = len(header)
        files.append(OutputFile(name, header, begin + size))
        for stored in group:
            places[stored.name] = Place(name, begin + offsets[stored.name], stored)
    return OutputLayout(files, places, total)


def _header(group: Sequence[Stored]) -> tuple[bytes, dict[str, int], int]:
    """Build the header of a file as safetensors writes it.

    Returns:
        The header, the offset of each tensor after it, and the bytes of all tensors.
    """
    ranks = {dtype: -place for place, dtype in enumerate(_ORDER)}
    ordered = sorted(group, key=lambda one: (ranks[one.dtype], one.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    begin = 0
    for stored in ordered:
        end = begin + stored.nbytes
        offsets[stored.name] = begin
        entries[stored.name] = {
            "dtype": stored.dtype,
            "shape": stored.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, offsets, begin
