# SPDX-License-Identifier: Apache-2.0
"""Conversion of a checkpoint's files before ``model_free_ptq`` quantizes them.

Any object of the converter interface of compressed-tensors takes part. The tensors are those that
the source is read as, and each file of the result is made of one file of the source, with what
belongs to it from others: a shard may hold nothing but scales of weights in another.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.utils.safetensors_load import load_tensors_from_inverse_weight_map
from safetensors.torch import save_file
from torch import Tensor

from llmcompressor.checkpoint.copied_files import copy_side_files, left_behind
from llmcompressor.checkpoint.source import CONFIG, INDEX, SourceInfo, inspect_source
from llmcompressor.errors import ArgumentError, CheckpointError
from llmcompressor.logger import logger
from llmcompressor.runtime.processes import Processes

_NEEDED = ("process", "validate")


def parse_converters(converter: Any) -> list[Any]:
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
def converted_checkpoint(
    source: SourceInfo,
    converters: Sequence[Any],
    beside: Path,
    *,
    device: str | None,
    workers: int,
    processes: Processes,
) -> Iterator[SourceInfo]:
    """Convert a checkpoint into a folder next to the output, which is removed afterwards.

    Args:
        source: the checkpoint.
        converters: result of :func:`parse_converters`; if empty, ``source`` itself is used.
        beside: the output folder.
        device: the device to compute on.
        workers: number of files to convert at a time.
        processes: of the run. The first one converts for all, and removes the folder in the end.

    Raises:
        ArgumentError: processes were given converters of other classes.
        CheckpointError: a converter refuses the checkpoint.
    """
    processes.check_equal("converter", [type(one).__name__ for one in converters])
    if not converters:
        yield source
        return
    target = Path(f"{os.fspath(beside)}.converted")
    if not processes.is_first:
        processes.all_gather("converted checkpoint", is_long=True)
        yield inspect_source(target, allow_quantized=True)
        return
    names = ", ".join(type(one).__name__ for one in converters)
    shutil.rmtree(target, ignore_errors=True)  # left by a run that was killed
    try:
        logger.info(f"Converted by {names} into {target}, which is removed in the end.")
        try:
            _convert(source, target, converters, device or "cpu", workers)
        except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
            raise CheckpointError(
                f"{names} cannot convert {source.directory}: {error}",
                "Correct the converter's targets and ignore, or leave it out.",
            ) from error
        processes.all_gather("converted checkpoint", is_long=True)
        yield inspect_source(target, allow_quantized=True)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _convert(
    source: SourceInfo, target: Path, converters: Sequence[Any], device: str, workers: int
) -> None:
    from compressed_tensors.entrypoints.convert import (  # noqa: PLC0415  # seldom needed
        build_inverse_weight_maps,
    )
    from compressed_tensors.entrypoints.convert.convert_file import (  # noqa: PLC0415
        write_checkpoint_quantization_config,
    )

    folder = source.directory
    files = sorted({one.file for one in source.tensors.values()})
    shards = {file: f"model-{number:05d}.safetensors" for number, file in enumerate(files, start=1)}
    places = {name: shards[one.file] for name, one in source.tensors.items()}
    whole = {place: str(file) for file, place in shards.items()}
    jobs = build_inverse_weight_maps(places, whole, list(converters))
    for needed in jobs.values():
        tensors = load_tensors_from_inverse_weight_map(needed, "meta")
        for one in converters:
            tensors = one.validate(tensors)
    target.mkdir(parents=True)
    work = partial(_convert_file, target, converters, device)
    with ThreadPoolExecutor(workers) as pool:
        made = dict(zip(jobs, pool.map(work, jobs.items()), strict=True))
    copy_side_files(folder, target)
    for name in left_behind(folder):  # the run tells of them, as it would without a converter
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(folder / name)
    shutil.copyfile(folder / CONFIG, target / CONFIG)
    write_checkpoint_quantization_config(target, list(converters))
    index = {"metadata": {}, "weight_map": {one: place for place in made for one in made[place]}}
    (target / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _convert_file(
    target: Path, converters: Sequence[Any], device: str, job: tuple[str, Mapping[str, list[str]]]
) -> list[str]:
    """Write what becomes of one file; return the names of its tensors."""
    place, needed = job
    tensors: dict[str, Tensor] = load_tensors_from_inverse_weight_map(dict(needed), device)
    for one in converters:
        tensors = one.process(tensors)
    # where blocks reach beyond the end of a matrix, what is left of it is a part of another tensor
    own = {name: one.clone(memory_format=torch.contiguous_format) for name, one in tensors.items()}
    save_file(own, target / place, {"format": "pt"})
    return list(own)
