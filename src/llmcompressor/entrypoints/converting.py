# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in another layout, converted into a folder of its own before it is quantized.

What converts is compressed-tensors, file by file, with any object of its converter interface.
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
    """The converters in what was given, in their order.

    Raises:
        ArgumentError: it is none.
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
    """While the body runs, the converted checkpoint lies beside the output.

    Args:
        model: the checkpoint: a folder, or an id on the hub.
        converters: as of :func:`check_converter`; without any it is used as it is.
        beside: the output.
        device: where to compute.
        workers: how many files to convert at a time.

    Raises:
        CheckpointError: a converter refuses it.
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
    shutil.rmtree(target, ignore_errors=True)  # of a run that was killed
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
