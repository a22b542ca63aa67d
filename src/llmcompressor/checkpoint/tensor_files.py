# SPDX-License-Identifier: Apache-2.0
"""Reading and writing of single tensors in safetensors files.

Files are read, not mapped: mapped pages count as memory of the process for as long as the mapping
lives. A file that shrinks or fails under a mapping ends the process with a signal, where a read
raises an error with the file's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from llmcompressor.checkpoint.source import SINGLE, TensorHeader
from llmcompressor.errors import CheckpointError
from llmcompressor.runtime.durable import errors_naming, sync

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "F4": torch.float4_e2m1fn_x2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""safetensors' names of dtypes; the last ones are stored first, so that all are aligned."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PAIRED = "F4"
"""Two numbers are one element of torch's dtype, and two of safetensors' shape."""
_ALIGNMENT = 8
_CHUNK = 2**23
"""Bytes that are read at once: few enough to be in the cache when they are hashed."""
_MOST = 2**26
"""Bytes that are written or hashed at once."""
_APART = 2**21
"""Bytes from which on memory is asked of the system: a huge page."""
SHARD_SIZE = 20_000_000_000
"""Bytes of tensors per file, unless the user says otherwise."""


class Digest(Protocol):
    """A hash that takes bytes piece by piece."""

    def update(self, data: Any, /) -> object:
        """Take more bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor on the CPU."""
    # a dimension of one element may have any stride, but only a stride of one can be viewed
    flat = tensor.reshape(-1).as_strided((tensor.numel(),), (1,))
    raw: Any = flat.view(torch.uint8).numpy()  # numpy's stubs know no buffers
    return memoryview(raw)


class BufferPool:
    """A thread-safe pool of read buffers by size, reused from block to block.

    Blocks of equal size come and go. In the heap each would leave holes, which are returned to the
    system, requested again and cleared page by page. Here large tensors get mappings of their own,
    in huge pages where the system has them; the next read of the same size reuses a mapping whose
    last tensor is gone. When a size has no idle buffer, all idle ones go back to the system.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._lock = threading.RLock()  # garbage collection inside may recycle a buffer
        self._is_open = True

    def take(self, nbytes: int, *, once: bool = False) -> Tensor:
        """Return a buffer that nothing else uses: uint8 ``[nbytes]`` on the CPU, of any content.

        It goes back to the system, and not to the pool, if such a size is needed only ``once``.
        """
        own = None
        if nbytes >= _APART and hasattr(mmap, "MADV_HUGEPAGE"):
            own = (None if once else self._take_idle(nbytes)) or _map_memory(nbytes)
        if own is None:
            return torch.empty(nbytes, dtype=torch.uint8)  # which raises if memory is exhausted
        array = np.frombuffer(own, dtype=np.uint8)
        if not once:
            # the tensor's storage keeps the array alive as long as any view of it
            weakref.finalize(array, self._recycle, nbytes, own).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Return idle buffers to the system, and free others as soon as they become idle."""
        with self._lock:
            self._is_open = False
            self._idle.clear()

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


class TensorReader:
    """Thread-safe reader of a checkpoint's tensors by name, given their headers.

    All files are ``opened`` at once if they may be renamed or removed later.
    """

    def __init__(self, headers: Mapping[str, TensorHeader], *, opened: bool = False) -> None:
        self._headers = headers
        self._files: dict[Path, int] = {}
        self._buffers = BufferPool()
        for header in headers.values() if opened else ():
            self._descriptor(header.file)

    def read(self, name: str, digest: Digest | None = None, *, once: bool = False) -> Tensor:
        """Read a tensor into CPU memory, in the dtype of the file; its bytes update ``digest``.

        Its memory is not kept for tensors to come where it is one that is read ``once``.

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
        """
        header = self._headers[name]
        dtype = torch_dtype(name, header)
        whole = header.shape if header.matrix is None else header.matrix
        shape = torch_shape(header.dtype, whole)
        nbytes = _stored_bytes(name, header)
        data = self._buffers.take(nbytes, once=once)
        view = bytes_of(data)
        done = 0
        while done < nbytes:
            with _read_errors(header.file):
                into = [view[done : done + _CHUNK]]
                count = os.preadv(self._descriptor(header.file), into, header.offset + done)
            if count == 0:
                raise CheckpointError(
                    f"The file {header.file} has become shorter while it was read.",
                    "Restore it; what is finished is kept, and the same call continues.",
                )
            if digest is not None:
                digest.update(view[done : done + count])
            done += count
        tensor = data.view(dtype).reshape(shape)
        if header.matrix is None:
            return tensor
        return (tensor.mT if header.turned else tensor)[slice(*header.rows)].contiguous()

    def file_stamps(self, names: Iterable[str]) -> dict[str, str]:
        """Return a stamp for each open file of some tensors, which changes if it is modified."""
        found: dict[str, str] = {}
        for header in map(self._headers.__getitem__, names):
            if header.file.name not in found:
                with _read_errors(header.file):
                    status = os.fstat(self._descriptor(header.file))
                times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
                found[header.file.name] = f"{status.st_size} {status.st_ino} {times}"
        return found

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


def torch_dtype(name: str, header: TensorHeader) -> torch.dtype:
    """Return the dtype of a stored tensor; CheckpointError if torch cannot hold it."""
    is_odd = header.dtype == _PAIRED and (not header.shape or header.shape[-1] % 2 == 1)
    if header.dtype not in DTYPES or is_odd:
        shape = f" and the shape {list(header.shape)}" if is_odd else ""
        raise CheckpointError(
            f"The tensor {name} of {header.file} has the dtype {header.dtype}{shape}, which torch "
            "does not know.",
            "Convert the checkpoint.",
        )
    return DTYPES[header.dtype]


def torch_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that torch has for a tensor of a dtype and a shape in a file.

    >>> torch_shape("F4", [2, 16]), torch_shape("BF16", [2, 16])
    ((2, 8), (2, 16))
    """
    return (*shape[:-1], shape[-1] // 2) if dtype == _PAIRED and shape else tuple(shape)


def stored_form(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape that a file has for a tensor."""
    dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    return dtype, (*shape[:-1], shape[-1] * 2) if dtype == _PAIRED and shape else shape


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


# Layout of the output files, computed before any tensor.
#
# A safetensors file begins with a header that places all its tensors. As names, dtypes and shapes
# follow from the model and its schemes, the files are laid out first. Blocks are then written to
# their places in any order, a killed run resumes, and the size of the output is known to the byte.


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts ``layers.2`` before ``layers.10``."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)
    ]


class StoredTensor(NamedTuple):
    """The name, dtype (as safetensors calls it) and shape of a stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor's data."""
        return prod(torch_shape(self.dtype, self.shape)) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class OutputFile:
    """A weight file of the output: its header with the length before it, and its whole size."""

    name: str
    header: bytes
    size: int


@dataclass(frozen=True)
class OutputLayout:
    """The layout of all weight files.

    ``places`` has the headers of tensors, with files relative to the output; ``total_size`` is the
    number of bytes of all tensors, ``file_size`` that of the files.
    """

    files: Sequence[OutputFile]
    places: Mapping[str, TensorHeader]
    total_size: int
    file_size: int

    def headers(self, folder: Path) -> dict[str, TensorHeader]:
        """Return the headers of the tensors in a folder."""
        return {name: replace(one, file=folder / one.file) for name, one in self.places.items()}

    def index(self) -> str | None:
        """Return the text of the index file; ``None`` for a single weight file."""
        if len(self.files) == 1:
            return None
        index = {
            "metadata": {"total_size": self.total_size},
            "weight_map": {name: str(place.file) for name, place in self.places.items()},
        }
        return json.dumps(index, indent=2, sort_keys=True) + "\n"


def layout_files(tensors: Iterable[StoredTensor], limit: int = SHARD_SIZE) -> OutputLayout:
    """Place tensors in files, in their order, with up to ``limit`` bytes of tensors in each."""
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
    places: dict[str, TensorHeader] = {}
    for number, group in enumerate(groups, start=1):
        name = (
            SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        header, offsets, size = _header(group)
        begin, file = len(header), Path(name)
        files.append(OutputFile(name, header, begin + size))
        for stored in group:
            place = (file, begin + offsets[stored], stored.nbytes)
            places[stored.name] = TensorHeader(stored.dtype, stored.shape, *place)
    return OutputLayout(files, places, total, sum(file.size for file in files))


def _header(group: Sequence[StoredTensor]) -> tuple[bytes, dict[StoredTensor, int], int]:
    """Return a file's header as safetensors writes it, each tensor's offset, and all bytes."""
    ranks = {dtype: -place for place, dtype in enumerate(DTYPES)}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[StoredTensor, int] = {}
    begin = 0
    for stored in sorted(group, key=lambda one: (ranks[one.dtype], one.name)):
        end = begin + stored.nbytes
        offsets[stored] = begin
        entries[stored.name] = {
            "dtype": stored.dtype,
            "shape": stored.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, offsets, begin


class TensorWriter:
    """Write tensors to their places in the files of a folder, in any order; data there is kept.

    Creating it allocates the disk space of all files, so that a full disk fails at once.

    Args:
        folder: the folder.
        layout: of its files.
        joins: another process has created and allocated the files, and writes to them too.
    """

    def __init__(self, folder: Path, layout: OutputLayout, *, joins: bool = False) -> None:
        self._folder, self._layout, self._joins = folder, layout, joins
        self._files: dict[Path, int] = {}
        try:
            for file in layout.files:
                with errors_naming(folder / file.name):
                    self._create(folder / file.name, file)
            sync(folder)
        except BaseException:
            self.close()
            raise

    def _create(self, path: Path, file: OutputFile) -> None:
        flags = os.O_RDWR | os.O_NOFOLLOW | (0 if self._joins else os.O_CREAT)
        descriptor = os.open(path, flags, 0o666)
        self._files[Path(file.name)] = descriptor
        if self._joins:
            return
        if os.fstat(descriptor).st_size != file.size:
            os.ftruncate(descriptor, file.size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, file.size)
        _write_all(descriptor, memoryview(file.header), 0)

    def as_planned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors as they are to be stored: contiguous, on the CPU, of the planned dtype.

        A float tensor is cast if that is lossless: some routers convert their own weights to
        float32 when they are called. CheckpointError for another shape or dtype than planned.
        """
        found = {}
        for name, given in tensors.items():
            tensor = given.detach().to("cpu").contiguous()
            place = self._layout.places.get(name)
            planned = tensor.dtype if place is None else DTYPES[place.dtype]
            is_float = tensor.is_floating_point() and planned.is_floating_point
            if is_float and planned is not tensor.dtype and tensor.element_size() > 1:
                narrow = tensor.to(planned)
                tensor = narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor
            own = stored_form(tensor)
            if place is None or (place.dtype, place.shape) != own:
                wanted = "nothing" if place is None else f"{place.dtype} {place.shape}"
                raise CheckpointError(
                    f"{name} was to be stored as {wanted} and is {own[0]} {own[1]}.",
                    "This is a defect of llmcompressor; the model was not written.",
                )
            found[name] = tensor
        return found

    def write(self, tensors: Mapping[str, Tensor], *, durable: bool = False) -> dict[str, str]:
        """Write tensors :meth:`as_planned`, synced if ``durable``; return the SHA-256 of each.

        They are hashed on a thread of their own, since writing waits for the disk.
        """
        views = {name: bytes_of(tensors[name]) for name in sorted(tensors)}
        with ThreadPoolExecutor(1) as beside:
            found = {name: beside.submit(hashlib.sha256, view) for name, view in views.items()}
            touched = set()
            for name, view in views.items():
                place = self._layout.places[name]
                with errors_naming(self._folder / place.file):
                    _write_all(self._files[place.file], view, place.offset)
                touched.add(place.file)
            for file in touched if durable else ():
                with errors_naming(self._folder / file):
                    os.fdatasync(self._files[file])
            return {name: one.result().hexdigest() for name, one in found.items()}

    def digests_of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the SHA-256 of the bytes now stored in the places of some tensors."""
        found = {}
        for name in sorted(names):
            digest = hashlib.sha256()
            place = self._layout.places[name]
            with errors_naming(self._folder / place.file):
                _hash_range(self._files[place.file], place.offset, place.nbytes, digest)
            found[name] = digest.hexdigest()
        return found

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def digest_of(digests: Mapping[str, str]) -> str:
    """Return the hash of several tensors, made of the hash of each, in the order of their names."""
    text = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _hash_range(descriptor: int, offset: int, nbytes: int, digest: Digest) -> None:
    """Update a hash with a range of a file, up to the file's end."""
    end = offset + nbytes
    while offset < end:
        part = os.pread(descriptor, min(end - offset, _CHUNK), offset)
        if not part:
            break
        digest.update(part)
        offset += len(part)


def hashes_of(headers: Mapping[str, TensorHeader]) -> dict[str, str]:
    """Return the hash of the bytes of each tensor of a source, as :class:`TensorReader` makes it.

    Raises:
        CheckpointError: a file cannot be read.
    """
    found = {}
    for name, header in headers.items():
        digest = xxhash.xxh3_128()
        with _read_errors(header.file), header.file.open("rb", buffering=0) as stream:
            _hash_range(stream.fileno(), header.offset, _stored_bytes(name, header), digest)
        found[name] = digest.hexdigest()
    return found


def _stored_bytes(name: str, header: TensorHeader) -> int:
    """Return the bytes that are read of a file for a tensor; of a selection those of its matrix."""
    whole = header.shape if header.matrix is None else header.matrix
    return prod(torch_shape(header.dtype, whole)) * torch_dtype(name, header).itemsize


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done : done + _MOST], offset + done)
