# SPDX-License-Identifier: Apache-2.0
"""How much main memory is free, for a machine and for a container with less than all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

__all__ = ["free_host_memory"]

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


class _Names(NamedTuple):
    """What a control group's files are called."""

    limit: str
    usage: str
    reclaimable: str


_UNIFIED = _Names("memory.max", "memory.current", "inactive_file")
_OLD = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_host_memory(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Bytes that this process may still take before the kernel ends it, or begins to swap.

    What is free of the machine, or of a control group's limit if that is less: in a container the
    machine has memory that the container may not use. Cached files that nobody reads count as free.

    Args:
        groups: where control groups are mounted.
        own: the groups of this process, as the kernel tells them.
    """
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_left(groups, own)]))


def _left(groups: Path, own: Path) -> Iterator[int]:
    """Bytes that each group which this process is in has left."""
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
    """The same of a group and all above it; a container sees its own one as the root."""
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
