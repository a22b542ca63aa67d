# SPDX-License-Identifier: Apache-2.0
"""Reader of single tensors from safetensors files, into memory of their own.

The files are read, not mapped: mapped pages count as memory of the process for as long as the
mapping lives. A file that shrinks or fails under a mapping ends the process with a signal, where a
read raises an error with the file's name.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from llmcompressor.checkpoint.source import SINGLE, RowSliceHeader, TensorHeader
from llmcompressor.errors import CheckpointError

__all__ = [
    "DTYPES",
    "SHARD_SIZE",
    "BufferPool",
    "OutputFile",
    "OutputLayout",
    "StoredTensor",
    "TensorPlace",
    "TensorReader",
    "TensorWriter",
    "bytes_of",
    "dtype_name",
    "layout_files",
    "natural_key",
    "read_tensors",
]


# --------------------
# A pool of read buffers, reused from block to block.
#
# Blocks of equal size come and go. In the heap each would leave holes, which are returned to the
# system, requested again and cleared page by page. Here large tensors get mappings of their own,
# in huge pages where the system has them. When the last tensor in a mapping is freed, the next
# read of the same size reuses it.

_APART = 2**21
"""Bytes from which on memory is asked of the system: a huge page."""


class BufferPool:
    """A thread-safe pool of buffers by size.

    When a size is requested that has no idle buffer, all idle buffers are returned to the system.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._lock = threading.RLock()  # garbage collection inside may recycle a buffer
        self._is_open = True

    def take(self, nbytes: int) -> Tensor:
        """Return a buffer that nothing else uses.

        Returns:
            uint8 ``[nbytes]`` on the CPU, of any content.
        """
        if nbytes < _APART or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(nbytes, dtype=torch.uint8)
        own = self._take_idle(nbytes) or _map_memory(nbytes)
        if own is None:
            return torch.empty(nbytes, dtype=torch.uint8)  # which raises if memory is exhausted
        array = np.frombuffer(own, dtype=np.uint8)
        # the tensor's storage keeps the array alive as long as any view of it
        weakref.finalize(array, self._recycle, nbytes, own).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Return idle buffers to the system, and free others as soon as they become idle."""
        with self._lock:
            self._is_open = False
            self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the idle buffers."""
        with self._lock:
            return sum(size * len(every) for size, every in self._idle.items())

    def _take_idle(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            if self._idle.get(nbytes):
                return self._idle[nbytes].pop()
            self._idle.clear()
        return None

    def _recycle(self, nbytes: int, own: mmap.mmap) -> None:
        with self._lock:
            if self._is_open:
                self._idle.setdefault(nbytes, []).append(own)


def _map_memory(nbytes: int) -> mmap.mmap | None:
    try:
        own = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no memory, or as many mappings as a process may have
        return None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        own.madvise(mmap.MADV_HUGEPAGE)
    return own


# --------------------
# Reader of single tensors from safetensors files, into memory of their own.

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
"""safetensors' names of dtypes."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 2**23
"""Bytes that are read at once: few enough to be in the cache when they are hashed."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype.

    >>> dtype_name(torch.bfloat16)
    'BF16'
    """
    return _NAMES[dtype]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor on the CPU."""
    # a dimension of one element may have any stride, but only a stride of one can be viewed
    flat = tensor.reshape(-1).as_strided((tensor.numel(),), (1,))
    raw: Any = flat.view(torch.uint8).numpy()  # numpy's stubs know no buffers
    return memoryview(raw)


class TensorReader:
    """Thread-safe reader of a checkpoint's tensors by name.

    Args:
        headers: name → the tensor's header.
    """

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self._headers = headers
        self._files: dict[Path, int] = {}
        self._buffers = BufferPool()

    def read(self, name: str, digest: xxhash.xxh3_128 | None = None) -> Tensor:
        """Read a tensor into CPU memory, in the dtype of the file.

        Args:
            name: the tensor's name.
            digest: updated with the bytes read.

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
        """
        header = self._headers[name]
        dtype = self._dtype(header, name)
        stored = header.matrix if isinstance(header, RowSliceHeader) else header.shape
        nbytes = prod(stored) * dtype.itemsize
        data = self._buffers.take(nbytes)
        view = bytes_of(data)
        done = 0
        while done < nbytes:
            count = self._read_into(header, view[done : done + _CHUNK], done)
            if digest is not None:
                digest.update(view[done : done + count])
            done += count
        tensor = data.view(dtype).reshape(stored)
        if isinstance(header, RowSliceHeader):
            tensor = tensor.mT if header.turned else tensor
            return tensor[slice(*header.rows)].contiguous()
        return tensor

    def file_stamps(self, names: Iterable[str]) -> dict[str, str]:
        """Return a stamp for each file of some tensors, which changes if the file is modified.

        It is that of the open file, which is the one that is read.

        Raises:
            CheckpointError: a file cannot be opened.
        """
        found: dict[str, str] = {}
        for header in map(self._headers.__getitem__, names):
            if header.file.name not in found:
                with _read_errors(header.file):
                    status = os.fstat(self._descriptor(header.file))
                times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
                found[header.file.name] = f"{status.st_size} {status.st_ino} {times}"
        return found

    def open_all(self) -> None:
        """Open every file now, so that it can be read even if it is renamed or removed."""
        for header in self._headers.values():
            self._descriptor(header.file)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        self._buffers.close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        return self._files[file]

    def _read_into(self, header: TensorHeader, view: memoryview, done: int) -> int:
        with _read_errors(header.file):
            count = os.preadv(self._descriptor(header.file), [view], header.offset + done)
        if count == 0:
            raise CheckpointError(
                f"The file {header.file} has become shorter while it was read.",
                "Restore it; what is finished is kept, and the same call continues.",
            )
        return count

    @staticmethod
    def _dtype(header: TensorHeader, name: str) -> torch.dtype:
        if header.dtype not in DTYPES:
            raise CheckpointError(
                f"The tensor {name} of {header.file} has the dtype {header.dtype}, which torch "
                "does not know.",
                "Convert the checkpoint.",
            )
        return DTYPES[header.dtype]


def read_tensors(headers: Mapping[str, TensorHeader]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of each tensor, one at a time."""
    reader = TensorReader(headers)
    try:
        for name in headers:
            yield name, reader.read(name)
    finally:
        reader.close()


@contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"The file {file} cannot be read: {error.strerror or error}.",
            "Check the disk; what is finished is kept, and the same call continues.",
        ) from error


# --------------------
# Layout of the output files, computed before any tensor.
#
# A safetensors file begins with a header that places all its tensors. As names, dtypes and shapes
# follow from the model and its schemes, the files are laid out first. Blocks are then written to
# their places in any order, a killed run resumes, and the size of the output is known to the byte.

SHARD_SIZE = 20_000_000_000
"""Bytes of tensors per file, unless the user says otherwise."""
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


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts ``layers.2`` before ``layers.10``."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)
    ]


@lru_cache(maxsize=4096)
def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * DTYPES[dtype].itemsize


class StoredTensor(NamedTuple):
    """The name, dtype and shape of a stored tensor."""

    name: str
    dtype: str
    """safetensors' name of the dtype."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor's data."""
        return _bytes(self.dtype, self.shape)


class TensorPlace(NamedTuple):
    """The place of a stored tensor in a file."""

    file: str
    offset: int
    """Bytes from the beginning of the file."""
    stored: StoredTensor


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
    places: Mapping[str, TensorPlace]
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


def layout_files(tensors: Iterable[StoredTensor], limit: int = SHARD_SIZE) -> OutputLayout:
    """Divide tensors into files in their order, and place them.

    Args:
        tensors: the tensors in the order to store them.
        limit: bytes of tensors per file; a single larger one gets a file of its own.
    """
    groups: list[list[StoredTensor]] = [[]]
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
    places: dict[str, TensorPlace] = {}
    for number, group in enumerate(groups, start=1):
        name = (
            SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        header, offsets, size = _header(group)
        begin = len(header)
        files.append(OutputFile(name, header, begin + size))
        for stored in group:
            places[stored.name] = TensorPlace(name, begin + offsets[stored.name], stored)
    return OutputLayout(files, places, total)


def _header(group: Sequence[StoredTensor]) -> tuple[bytes, dict[str, int], int]:
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


# --------------------
# Writer of tensors to their places in the output files.

_MOST = 2**26
"""Bytes that are written or hashed at once."""


class TensorWriter:
    """Write tensors to their planned places, in any order.

    Creating it allocates the disk space of all files, so that a full disk fails at once.

    Args:
        folder: the folder of the files; data that they hold already is kept.
        layout: the place of each tensor.
    """

    def __init__(self, folder: Path, layout: OutputLayout) -> None:
        self._layout = layout
        self._files: dict[str, int] = {}
        try:
            for file in layout.files:
                self._open(folder, file)
        except BaseException:
            self.close()
            raise

    def as_planned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors as they are to be stored: contiguous, on the CPU, of the planned dtype.

        Raises:
            CheckpointError: one of them has another shape or dtype than planned.
        """
        return {
            name: self._as_planned(name, tensor.detach().to("cpu").contiguous())
            for name, tensor in tensors.items()
        }

    def write(self, tensors: Mapping[str, Tensor], *, durable: bool = False) -> str:
        """Write tensors and return the hash of their bytes.

        Args:
            tensors: the result of :meth:`as_planned`.
            durable: sync them to the disk.
        """
        digest = xxhash.xxh3_128()
        touched = set()
        for name in sorted(tensors):
            view = bytes_of(tensors[name])
            digest.update(view)
            place = self._layout.places[name]
            _write_all(self._files[place.file], view, place.offset)
            touched.add(place.file)
        if durable:
            for file in touched:
                os.fdatasync(self._files[file])
        return digest.hexdigest()

    def digest_of(self, names: Iterable[str]) -> str:
        """Return the hash of the bytes now stored in the places of some tensors."""
        digest = xxhash.xxh3_128()
        for name in sorted(names):
            place = self._layout.places[name]
            offset, left = place.offset, place.stored.nbytes
            while left:
                part = os.pread(self._files[place.file], min(left, _MOST), offset)
                if not part:
                    break
                digest.update(part)
                offset, left = offset + len(part), left - len(part)
        return digest.hexdigest()

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _open(self, folder: Path, file: OutputFile) -> None:
        descriptor = os.open(folder / file.name, os.O_RDWR | os.O_CREAT, 0o666)
        self._files[file.name] = descriptor
        if os.fstat(descriptor).st_size != file.size:
            os.ftruncate(descriptor, file.size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, file.size)
        _write_all(descriptor, memoryview(file.header), 0)

    def _as_planned(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor in its planned float dtype, if the cast is lossless.

        Some routers convert their own weights to float32 when they are called.
        """
        place = self._layout.places.get(name)
        if place is not None and tensor.is_floating_point() and tensor.element_size() > 1:
            planned = DTYPES[place.stored.dtype]
            if planned != tensor.dtype and planned.is_floating_point:
                narrow = tensor.to(planned)
                tensor = narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor
        found = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if place is None or (place.stored.dtype, place.stored.shape) != found:
            wanted = "nothing" if place is None else f"{place.stored.dtype} {place.stored.shape}"
            raise CheckpointError(
                f"{name} was to be stored as {wanted} and is {found[0]} {found[1]}.",
                "This is a defect of llmcompressor; the model was not written.",
            )
        return tensor


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done : done + _MOST], offset + done)
