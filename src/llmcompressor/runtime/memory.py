# SPDX-License-Identifier: Apache-2.0
"""Return of freed heap memory and mapped pages to the operating system."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

import numpy as np
import psutil
import torch

TOLERATED = 2**26
"""Bytes that may stay freed and held: less than the libraries themselves take. To return what is
wanted again a moment later costs up to an eighth of a run's time, for pages are made anew."""


_kept_anyway = -math.inf
"""The least that this process had beside what was in use since memory was last returned."""


def malloc_trim(*, at_least: int = TOLERATED) -> None:
    """Return freed memory to the operating system, if the C library is glibc.

    Long-lived activations and short-lived temporaries lie side by side in the heap, and glibc only
    shrinks it from its end. Without this call a run would hold far more memory than it uses.
    Nothing happens if fewer bytes than ``at_least`` were freed since the last call; 0 is always.
    """
    global _kept_anyway  # noqa: PLW0603 - the heap belongs to the process too
    library = _library()
    if library is None:
        return
    unused = _unused_heap_bytes(library)
    if at_least > 0 and unused - _kept_anyway < at_least:
        _kept_anyway = min(_kept_anyway, unused)
        return
    library.malloc_trim(0)
    _kept_anyway = _unused_heap_bytes(library)


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _unused_heap_bytes(library: ctypes.CDLL) -> float:
    """Private memory that the C library has not handed out: freed, stacks, Python's objects."""
    look = getattr(library, "mallinfo2", None)
    if look is None:  # glibc before 2.33: unknown, so memory is returned each time
        return math.nan
    look.restype = _Heap
    heap = look()
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * mmap.PAGESIZE - int(heap.uordblks) - int(heap.hblkhd)


def release_pages(address: int, nbytes: int) -> None:
    """Release the pages of a mapped file, so that they no longer count as this process's memory.

    Written data stays in the file, and the page cache writes it to disk when it needs the memory.
    Data that is read again is loaded again. Pages at the ends that are shared with others are kept.
    """
    library = _library()
    if library is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def release_clean_pages(address: int, nbytes: int) -> bool:
    """As :func:`release_pages`, unless a page holds what is not in a file; True if they are freed.

    A page of a private mapping that was written to is not; pages of the heap are not either.
    Linux tells by bits 61 to 63 of each entry of ``/proc/self/pagemap``.
    """
    first, last = -(-address // mmap.PAGESIZE), (address + nbytes) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            bits = np.frombuffer(file.read(8 * max(last - first, 0)), dtype=np.uint64) >> 61
    except OSError:
        return False
    in_file, in_swap, is_present = bits & 1, bits & 2, bits & 4
    is_clean = not np.any(in_swap) and not np.any(is_present.astype(bool) & (in_file == 0))
    if is_clean:
        release_pages(address, nbytes)
    return is_clean


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the C library if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        _ = library.malloc_trim, library.madvise
    except (AttributeError, OSError):  # another one, musl for instance
        return None
    return library


# --------------------
# Free main memory, on a machine and in a container with a memory limit.

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


class _CgroupFiles(NamedTuple):
    """The file names of a control group."""

    limit: str
    usage: str
    reclaimable: str


_UNIFIED = _CgroupFiles("memory.max", "memory.current", "inactive_file")
_OLD = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_host_memory(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Return the bytes that this process can still allocate before the kernel kills it or swaps.

    That is the machine's free memory, or what is left of a control group's limit if that is less,
    as in a container. Cached files that are not in use count as free. ``groups`` is the mount point
    of control groups, ``own`` the kernel's list of this process's.
    """
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_free_in_cgroups(groups, own)]))


def _free_in_cgroups(groups: Path, own: Path) -> Iterator[int]:
    """Yield the bytes left in each control group of this process."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _free_in_cgroup(groups, path, _UNIFIED)
        elif "memory" in controllers.split(","):
            yield from _free_in_cgroup(groups / "memory", path, _OLD)


def _free_in_cgroup(mount: Path, path: str, names: _CgroupFiles) -> Iterator[int]:
    """Yield the bytes left in a group and all groups above it; a container's own is the root."""
    within = PurePosixPath(path.lstrip("/"))
    for place in (mount / within, *(mount / parent for parent in within.parents)):
        try:
            limit = int((place / names.limit).read_text())
            usage = int((place / names.usage).read_text())
            figures = (place / "memory.stat").read_text().split()
        except (OSError, ValueError):  # not there, or "max": no limit
            continue
        cached = dict(zip(figures[::2], figures[1::2], strict=False)).get(names.reclaimable, 0)
        yield limit - usage + int(cached)


# --------------------
# Free memory of an accelerator, and release of torch's cached memory.


def free_device_memory(device: torch.device | int) -> int:
    """Return the bytes that this process can still allocate on an accelerator.

    That is the device's free memory plus the memory cached by torch's allocator and used by no
    tensor. The device counts the cache as used, and it grows to the highest peak so far.
    """
    index = device if isinstance(device, int) else device.index
    if index is None:
        index = torch.accelerator.current_device_index()
    free, _ = torch.accelerator.get_memory_info(index)
    held = torch.accelerator.memory_reserved(index) - torch.accelerator.memory_allocated(index)
    return int(free) + max(int(held), 0)


def empty_device_cache() -> None:
    """Return torch's cached memory to the accelerators.

    Its pieces have the sizes of earlier allocations, and later ones may not fit into them.
    """
    if torch.accelerator.is_available():
        gc.collect()  # an unused model may still be kept by a reference cycle
        torch.accelerator.empty_cache()
