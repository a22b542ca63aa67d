# SPDX-License-Identifier: Apache-2.0
"""Disk offload of activations that exceed their memory budget."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmcompressor.errors import OutputError
from llmcompressor.logger import logger
from llmcompressor.runtime.memory import free_device_memory, free_host_memory, release_pages

_SHARE_OF_FREE_MEMORY = 0.5


def activation_budget(given: int | str | None) -> int:
    """Bytes of activations that may stay in main memory: as given, else half of the free memory."""
    return int(given or free_host_memory() * _SHARE_OF_FREE_MEMORY)


def device_activation_budget(device: torch.device, limit: int | None = None) -> int:
    """Bytes of activations that may stay on an accelerator: half of its free memory.

    Args:
        device: the accelerator.
        limit: maximum bytes in use there in total.
    """
    if device.type != "cuda":
        return 0
    free = free_device_memory(device)
    if limit is not None:
        free = min(free, max(limit - torch.cuda.memory_allocated(device), 0))
    return int(free * _SHARE_OF_FREE_MEMORY)


class SpillFiles:
    """Temporary files without a name once they are mapped, so that a killed process leaves none.

    Attributes:
        written: total bytes written.
    """

    def __init__(self) -> None:
        self.written = 0

    def put(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Copy a storage to a file of its own.

        Returns:
            The storage that is mapped to it; the file is deleted with it.

        Raises:
            OutputError: the disk has no room for it.
        """
        nbytes = storage.nbytes()
        with reserved_file(nbytes) as name:
            mapped = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
        self.written += nbytes
        source = torch.empty(0, dtype=torch.uint8, device=storage.device)
        mapped.copy_(source.set_(storage, 0, (nbytes,), (1,)))
        release_pages(mapped.data_ptr(), nbytes)
        return mapped.untyped_storage()


class TensorStore:
    """Store of tensors: on their device if they fit, else in main memory, else in files.

    Args:
        budget: bytes that may be stored in main memory.
        on_device: bytes that may be stored on an accelerator.

    Attributes:
        peak: maximum bytes stored in main memory at once.
    """

    def __init__(self, budget: int, on_device: int = 0) -> None:
        self._budgets = {True: budget, False: on_device}
        self._held = {True: 0, False: 0}
        self._spill = SpillFiles()
        self._kept: dict[int, Tensor] = {}
        self._in_files: set[int] = set()
        self._count = 0
        self.peak = 0

    @property
    def spilled(self) -> int:
        """Total bytes written to files."""
        return self._spill.written

    def put(self, tensor: Tensor) -> int:
        """Store a tensor.

        Returns:
            A ticket for :meth:`take`.
        """
        self._count += 1
        ticket, kept = self._count, tensor.detach()
        if kept.device.type != "cpu" and not self._fits(kept):
            kept = kept.to("cpu")
        if self._fits(kept):
            self._hold(kept, 1)
        else:
            apart = kept.clone(memory_format=torch.contiguous_format)
            storage = self._spill.put(apart.untyped_storage())
            self._in_files.add(ticket)
            mapped = torch.empty(0, dtype=apart.dtype)
            kept = mapped.set_(storage, 0, apart.size(), apart.stride())
        self._kept[ticket] = kept
        return ticket

    def take(self, ticket: int, device: torch.device) -> Tensor:
        """Return the tensor of a ticket, and remove it from the store."""
        tensor = self._kept[ticket].to(device, copy=ticket in self._in_files)
        self.drop(ticket)
        return tensor

    def peek(self, ticket: int, device: torch.device) -> Tensor:
        """Return the tensor of a ticket, which stays stored; it must not be changed."""
        return self._kept[ticket].to(device)

    def drop(self, ticket: int) -> None:
        """Free the tensor of a ticket."""
        tensor = self._kept.pop(ticket)
        if ticket in self._in_files:
            self._in_files.remove(ticket)
        else:
            self._hold(tensor, -1)

    @property
    def is_empty(self) -> bool:
        """Return True if nothing is stored."""
        return not self._kept

    def _fits(self, tensor: Tensor) -> bool:
        on_host = tensor.device.type == "cpu"
        return self._held[on_host] + _bytes(tensor) <= self._budgets[on_host]

    def _hold(self, tensor: Tensor, sign: int) -> None:
        self._held[tensor.device.type == "cpu"] += sign * _bytes(tensor)
        self.peak = max(self.peak, self._held[True])

    def close(self) -> None:
        """Free all tensors."""
        self._kept.clear()
        self._in_files.clear()
        self._held = dict.fromkeys(self._held, 0)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def reserved_file(nbytes: int) -> Iterator[str]:
    """A temporary file with reserved disk space, which has its name while the body runs.

    The space is taken at once: writing to a mapped file on a full disk would kill the process.

    Raises:
        OutputError: the disk has no room for it.
    """
    name = ""
    try:
        descriptor, name = tempfile.mkstemp(prefix="llmcompressor-activations-")
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)
        yield name
    except OSError as error:
        raise OutputError(
            "Activations that exceed the memory cannot be put into "
            f"{Path(name).parent if name else 'a temporary file'}: {error}.",
            "Have TMPDIR name a folder with more space, or calibrate with fewer samples.",
        ) from error
    finally:
        if name:
            Path(name).unlink(missing_ok=True)


# --------------------
# Memory-mapped storages in unnamed files, read and written in place.
#
# They belong to the page cache: the system writes them to disk when it needs the memory for
# something else, and reads them again on access. Nothing has to be fetched before it is used, so
# it does not matter whether it will ever be used again.

_EXTENT = 32 * 2**20
"""Bytes by which the file grows at least."""


@dataclass(eq=False)
class _Extent:
    """A part of the file, mapped as a whole."""

    descriptor: int
    view: memoryview
    address: int
    used: int = 0
    """Bytes that were given out at one time or another."""


class MmapStoragePool:
    """Allocates storages in unnamed memory-mapped files.

    A place is free again when the last tensor releases its storage.

    Args:
        room: the maximum total bytes of the files.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._closed = False
        self._extents: list[_Extent] = []
        self._free: list[tuple[int, int, int]] = []
        """Free places by size: bytes, number of the extent, offset in it."""
        self._returned: list[tuple[int, int, int]] = []
        """Places that came back, at any moment, since the last one was looked for."""

    @property
    def bytes(self) -> int:
        """Total bytes of the files."""
        return sum(len(extent.view) for extent in self._extents)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Return True if a storage lies in these files."""
        address = storage.data_ptr()
        extents = ((extent.address, len(extent.view)) for extent in self._extents)
        return any(start <= address < start + size for start, size in extents)

    def put(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Copy a storage to a place in the files.

        Args:
            storage: in main memory.

        Returns:
            The storage at that place; ``None`` where there is no room for it.
        """
        nbytes = storage.nbytes()
        found = self._allocate(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if found is None:
            return None
        extent, start, place = found
        content = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
        # Not through the mapping, where the first write to each page is a page fault.
        _write(extent.descriptor, content.numpy().data, start)
        return torch.frombuffer(place, dtype=torch.uint8, count=nbytes).untyped_storage()

    def let_go(self) -> None:
        """Release the resident memory of all storages until they are accessed again."""
        for extent in self._extents:
            release_pages(extent.address, extent.used)

    def close(self) -> None:
        """Accept no more storages; present ones stay as long as they are referenced."""
        self._closed = True
        self._extents.clear()

    def _allocate(self, size: int) -> tuple[_Extent, int, memoryview] | None:
        """A free place of at least ``size`` bytes, which are whole pages."""
        if self._closed:
            return None
        while self._returned:
            bisect.insort(self._free, self._returned.pop())
        at = bisect.bisect_left(self._free, (size, -1, -1))
        if at < len(self._free) and self._free[at][0] <= 2 * size:
            size, number, start = self._free.pop(at)
            return self._given(size, number, start)
        room = (len(extent.view) - extent.used >= size for extent in self._extents)
        number = next((index for index, enough in enumerate(room) if enough), len(self._extents))
        if number == len(self._extents):
            wanted = max(size, _EXTENT)
            if self.bytes + wanted > self._room:
                return None
            made = _create_extent(wanted)
            if made is None:
                self._room = 0  # do not ask the disk again once it refused
                return None
            self._extents.append(made)
        start = self._extents[number].used
        self._extents[number].used += size
        return self._given(size, number, start)

    def _given(self, size: int, number: int, start: int) -> tuple[_Extent, int, memoryview]:
        """Hand out a place that returns to the free list once it is no longer referenced."""
        extent = self._extents[number]
        place = extent.view[start : start + size]
        back = weakref.finalize(place, self._returned.append, (size, number, start))
        back.atexit = False
        return extent, start, place


def _write(descriptor: int, content: memoryview, at: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, at)
        content, at = content[written:], at + written


def _create_extent(size: int) -> _Extent | None:
    """A new extent, if the disk has room for it and can reserve it."""
    if not hasattr(os, "posix_fallocate"):
        return None
    try:
        with reserved_file(size) as name:
            descriptor = os.open(name, os.O_RDWR)
            try:
                mapped = mmap.mmap(descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
    except OutputError as error:
        logger.warning(f"{error} Meanwhile they stay in memory.")
        return None
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    extent = _Extent(descriptor, memoryview(mapped), address)
    weakref.finalize(extent, os.close, descriptor)
    return extent
