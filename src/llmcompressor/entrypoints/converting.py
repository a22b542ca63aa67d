# SPDX-License-Identifier: Apache-2.0
"""Checkpoint conversion by compressed-tensors, before model-free quantization.

Files are converted one by one into a temporary folder, with any object of the converter interface.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmcompressor.checkpoint.hub import fetch
from llmcompressor.checkpoint.source import is_hub_id
from llmcompressor.errors import ArgumentError, CheckpointError
from llmcompressor.logger import logger

__all__ = ["check_converter", "converted"]

_NEEDED = ("process", "validate")


def check_converter(converter: Any) -> list[Any]:
    """Return the argument ``converter`` as a list of converters.

    Raises:
        ArgumentError: an item is not a converter.
    """
    if converter is None:
        return []
    several = list(converter) if isinstance(converter, list | tuple) else [converter]
    for one in several:
        lacking = [name for name in _NEEDED if not callable(getattr(one, name, None))]
        if lacking:
            raise ArgumentError(
                f"The argument 'converter' is a {type(one).__name__}, which has no "
                f"{', '.join(lacking)}.",
                "Give a converter of compressed_tensors.entrypoints.convert, or several in a list.",
            )
    return several


@contextmanager
def converted(
    model: str, converters: Sequence[Any], beside: Path, *, device: str | None, workers: int
) -> Iterator[str]:
    """Convert a checkpoint into a folder next to the output, which is removed afterwards.

    Args:
        model: the checkpoint: a folder, or an id on the hub.
        converters: result of :func:`check_converter`; if empty, ``model`` itself is used.
        beside: the output folder.
        device: the device to compute on.
        workers: number of files to convert at a time.

    Raises:
        CheckpointError: a converter refuses the checkpoint.
    """
    if not converters:
        yield model
        return
    folder = fetch(model) if is_hub_id(model) else model
    from compressed_tensors.entrypoints.convert import (  # noqa: PLC0415  # seldom needed
        convert_checkpoint,
    )

    target = Path(f"{os.fspath(beside)}.converted")
    names = ", ".join(type(one).__name__ for one in converters)
    shutil.rmtree(target, ignore_errors=True)  # left by a run that was killed
    try:
        logger.info(f"Converted by {names} into {target}, which is removed in the end.")
        try:
            convert_checkpoint(folder, target, list(converters), workers, device or "cpu")
        except (ValueError, KeyError, NotImplementedError) as error:
            raise CheckpointError(
                f"{names} cannot convert {model}: {error}",
                "Correct the converter's targets and ignore, or leave it out.",
            ) from error
        yield str(target)
    finally:
        shutil.rmtree(target, ignore_errors=True)
