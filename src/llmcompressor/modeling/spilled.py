# SPDX-License-Identifier: Apache-2.0
"""Disk offload of activations that exceed their memory budget."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from llmcompressor.device_memory import free_device_memory
from llmcompressor.errors import OutputError
from llmcompressor.host_memory import free_host_memory
from llmcompressor.memory import let_go_of_pages

__all__ = ["Shelf", "Spill", "activation_budget", "reserved", "room_on"]

_SHARE_OF_FREE_MEMORY = 0.5


def activation_budget(given: int | str | None) -> int:
    """Bytes of activations that may stay in main memory: as given, else half of the free memory."""
    return int(given or free_host_memory() * _SHARE_OF_FREE_MEMORY)


def room_on(device: torch.device, limit: int | None = None) -> int:
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


class Spill:
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
        with reserved(nbytes) as name:
            mapped = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
        self.written += nbytes
        source = torch.empty(0, dtype=torch.uint8, device=storage.device)
        mapped.copy_(source.set_(storage, 0, (nbytes,), (1,)))
        let_go_of_pages(mapped.data_ptr(), nbytes)
        return mapped.untyped_storage()


class Shelf:
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
        self._spill = Spill()
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

    def see(self, ticket: int, device: torch.device) -> Tensor:
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

    def clear(self) -> None:
        """Free all tensors."""
        self._kept.clear()
        self._in_files.clear()
        self._held = dict.fromkeys(self._held, 0)

    def close(self) -> None:
        """Free everything."""
        self.clear()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def reserved(nbytes: int) -> Iterator[str]:
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
