# SPDX-License-Identifier: Apache-2.0
"""Memory-mapped storages in unnamed files, read and written in place.

They belong to the page cache: the system writes them to disk when it needs the memory for something
else, and reads them again on access. Nothing has to be fetched before it is used, so it does not
matter whether it will ever be used again.
"""

from __future__ import annotations

import bisect
import mmap
import os
import weakref
from dataclasses import dataclass

import torch

from llmcompressor.errors import OutputError
from llmcompressor.logger import logger
from llmcompressor.memory import let_go_of_pages
from llmcompressor.modeling.spilled import reserved

__all__ = ["PageFile"]

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


class PageFile:
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
        found = self._place(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
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
            let_go_of_pages(extent.address, extent.used)

    def close(self) -> None:
        """Accept no more storages; present ones stay as long as they are referenced."""
        self._closed = True
        self._extents.clear()

    def _place(self, size: int) -> tuple[_Extent, int, memoryview] | None:
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
            made = _new_extent(wanted)
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


def _new_extent(size: int) -> _Extent | None:
    """A new extent, if the disk has room for it and can reserve it."""
    if not hasattr(os, "posix_fallocate"):
        return None
    try:
        with reserved(size) as name:
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
