# SPDX-License-Identifier: Apache-2.0
"""Whether a disk has room for what a run will write to it, seen before the work."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmcompressor.errors import OutputError
from llmcompressor.units import in_bytes

__all__ = ["check_space", "lacking"]


def check_space(place: Path, *, output: int, scratch: int = 0) -> None:
    """See that a disk has room.

    Args:
        place: on that disk.
        output: bytes that weight files lack yet.
        scratch: bytes that blocks between two passes lack yet.

    Raises:
        OutputError: there is not enough.
    """
    there = next(one for one in (place, *place.parents) if one.exists())
    free = shutil.disk_usage(there).free
    if output + scratch > free:
        between = f" and {in_bytes(scratch)} for blocks between passes" if scratch else ""
        raise OutputError(
            f"The output needs {in_bytes(output)} more{between}, and the disk that holds {place} "
            f"has {in_bytes(free)} left.",
            "Free some space or choose another output directory.",
        )


def lacking(folder: Path, size: int) -> int:
    """How much of ``size`` bytes the files of a folder, if it is there, have not taken yet."""
    files = folder.iterdir() if folder.is_dir() else ()
    return max(0, size - sum(one.stat().st_blocks * 512 for one in files if one.is_file()))
