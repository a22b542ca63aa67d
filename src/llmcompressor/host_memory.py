# SPDX-License-Identifier: Apache-2.0
"""Free main memory, on a machine and in a container with a memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

__all__ = ["free_host_memory"]

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


class _Names(NamedTuple):
    """The file names of a control group."""

    limit: str
    usage: str
    reclaimable: str


_UNIFIED = _Names("memory.max", "memory.current", "inactive_file")
_OLD = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_host_memory(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Return the bytes that this process can still allocate before the kernel kills it or swaps.

    That is the machine's free memory, or what is left of a control group's limit if that is less,
    as in a container. Cached files that are not in use count as free.

    Args:
        groups: the mount point of control groups.
        own: the kernel's list of this process's groups.
    """
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_left(groups, own)]))


def _left(groups: Path, own: Path) -> Iterator[int]:
    """Yield the bytes left in each control group of this process."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left_of(groups, path, _UNIFIED)
        elif "memory" in controllers.split(","):
            yield from _left_of(groups / "memory", path, _OLD)


def _left_of(mount: Path, path: str, names: _Names) -> Iterator[int]:
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
