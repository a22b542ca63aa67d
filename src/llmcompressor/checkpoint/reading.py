# SPDX-License-Identifier: Apache-2.0
"""Reader of single tensors from safetensors files, into memory of their own.

The files are read, not mapped: mapped pages count as memory of the process for as long as the
mapping lives. A file that shrinks or fails under a mapping ends the process with a signal, where a
read raises an error with the file's name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from llmcompressor.checkpoint.buffers import Buffers
from llmcompressor.checkpoint.source import PieceHeader, TensorHeader
from llmcompressor.errors import CheckpointError

__all__ = ["DTYPES", "TensorReader", "bytes_of", "dtype_name"]

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
        self._buffers = Buffers()

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
        stored = header.matrix if isinstance(header, PieceHeader) else header.shape
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
        if isinstance(header, PieceHeader):
            tensor = tensor.mT if header.turned else tensor
            return tensor[slice(*header.rows)].contiguous()
        return tensor

    def stamps(self, names: Iterable[str]) -> dict[str, str]:
        """Return a stamp for each file of some tensors, which changes if the file is modified.

        It is that of the open file, which is the one that is read.

        Raises:
            CheckpointError: a file cannot be opened.
        """
        found: dict[str, str] = {}
        for header in map(self._headers.__getitem__, names):
            if header.file.name not in found:
                with _one_clear_error(header.file):
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
        with _one_clear_error(header.file):
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


@contextmanager
def _one_clear_error(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"The file {file} cannot be read: {error.strerror or error}.",
            "Check the disk; what is finished is kept, and the same call continues.",
        ) from error
