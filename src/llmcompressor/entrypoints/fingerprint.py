# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of a run: everything that determines its output, so that only the same resumes."""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import torch
import xxhash
from torch import Tensor

from llmcompressor.args import DatasetArguments
from llmcompressor.checkpoint.reading import bytes_of
from llmcompressor.checkpoint.source import CONFIG, SourceInfo
from llmcompressor.numerics.linear import is_slow

__all__ = ["fingerprint_of", "source_print"]

_LIBRARIES = ("llmcompressor", "torch", "transformers", "compressed-tensors")
_version = functools.cache(version)  # reads the package's metadata anew each time
_CALIBRATION = (
    "pipeline",
    "sequential_targets",
    "sequential_granularity",
    "propagate_error",
    "use_loss_mask",
    "moe_calibrate_all_experts",
    "starved_experts",
    "min_tokens_per_module",
)
"""Arguments that change what is found for a given set of batches."""


def fingerprint_of(
    source: SourceInfo,
    *,
    recipe: str | None,
    batches: Iterable[Mapping[str, Any]] | None,
    dataset_args: DatasetArguments,
    dtype: torch.dtype,
    device: torch.device,
    output: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fingerprint of a run, the first entry of its journal.

    Args:
        source: the original checkpoint.
        recipe: as YAML.
        batches: calibration batches.
        dataset_args: calibration arguments.
        dtype: of the model.
        device: the device to compute on.
        output: options that determine how the output is written.
    """
    prints: dict[str, Any] = {
        "source": source_print(source),
        "recipe": recipe,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "machine": platform.machine(),
        "versions": {name: _version(name) for name in _LIBRARIES},
        "output": dict(output),
    }
    if batches is not None:
        prints["calibration"] = {name: getattr(dataset_args, name) for name in _CALIBRATION}
        prints["data"] = _data(batches)
        prints["seed"] = dataset_args.seed
        if device.type == "cpu":  # it determines the summation order of products
            prints["threads"] = torch.get_num_threads()
            prints["widened"] = is_slow(dtype)
    return json.loads(json.dumps(prints))  # type: ignore[no-any-return]  # as when read back


def source_print(source: SourceInfo) -> dict[str, str]:
    """Fingerprint of a checkpoint by file: size and a hash of the header, without the data.

    Args:
        source: the checkpoint; its ``config.json`` is hashed as a whole.
    """
    by_file: dict[str, list[str]] = {}
    for name, header in source.tensors.items():
        entry = f"{name} {header.dtype} {header.shape} {header.offset}"
        by_file.setdefault(str(header.file), []).append(entry)
    prints = {}
    for file in sorted(by_file):
        path = next(h.file for h in source.tensors.values() if str(h.file) == file)
        digest = xxhash.xxh3_64_hexdigest("\n".join(sorted(by_file[file])).encode())
        prints[path.name] = f"{path.stat().st_size} bytes, header {digest}"
    config = source.directory / CONFIG
    prints[CONFIG] = xxhash.xxh3_64_hexdigest(config.read_bytes())
    return prints


def _data(batches: Iterable[Mapping[str, Any]]) -> str:
    """Number of batches and a hash of their values."""
    digest = xxhash.xxh3_128()
    count = 0
    for batch in batches:
        count += 1
        for name in sorted(batch):
            value = batch[name]
            if isinstance(value, Tensor):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(bytes_of(value.detach().cpu().contiguous()))
            else:
                digest.update(f"{name} {value!r}".encode())
    return f"{count} batches, {digest.hexdigest()}"
