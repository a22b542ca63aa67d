# SPDX-License-Identifier: Apache-2.0
"""Check of free disk space before a run."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmcompressor.checkpoint.extras import side_files
from llmcompressor.errors import OutputError
from llmcompressor.units import in_bytes

__all__ = ["beside_weights", "check_space", "lacking"]

_BLOCK = 4096
_FILES = 8
_PER_TENSOR = 512


def check_space(place: Path, *, output: int, scratch: int = 0) -> None:
    """Check that a disk has room for the output.

    Args:
        place: a path on that disk.
        output: bytes still to be allocated for weight files.
        scratch: bytes still to be allocated for blocks between two passes.

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


def beside_weights(source: Path | None, tensors: int) -> int:
    """Estimate the bytes of all files besides the weights: side files, index and report.

    Args:
        source: the folder of the original.
        tensors: number of stored tensors; index, configuration and report have lines on each.
    """
    files = [] if source is None else side_files(source)
    return (
        sum(one.stat().st_size + _BLOCK for one in files) + tensors * _PER_TENSOR + _FILES * _BLOCK
    )


def lacking(folder: Path, size: int) -> int:
    """Return how many of ``size`` bytes the files of a folder have not allocated yet."""
    files = folder.iterdir() if folder.is_dir() else ()
    return max(0, size - sum(one.stat().st_blocks * 512 for one in files if one.is_file()))
