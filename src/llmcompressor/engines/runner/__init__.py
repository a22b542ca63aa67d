# SPDX-License-Identifier: Apache-2.0
"""Code for the engine's process: it imports the engine, torch, safetensors and Python's library.

The folder is copied beside the job and started as a package of its own, since the environment of
an engine need not have this package.

Here are the inputs for single modules: random signs times one number. Every scheme of activations
holds them: the largest magnitude of each row, group and tensor is that of all, so that dynamic
scales put it at the end of the grid. What a module gives then differs from the product in full by
the rounding of sums and scales alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_STEPS = 64.0
"""Steps of a static scale that an input has: a number that int8 and 8-bit floats hold."""


def signs(name: str, rows: int, columns: int) -> Tensor:
    """Float32 ``[rows, columns]`` of -1 and 1, the same for a name in every process."""
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, 2, (rows, columns), generator=source).float() * 2 - 1


def amplitude(name: str, module: Any, job: Mapping[str, Any], shards: list[str]) -> float:
    """The magnitude of a module's inputs: on the grid of its static scale, if it has one.

    Args:
        name: the module's name in the engine.
        module: the module.
        job: of which ``amplitudes`` has those of an earlier run, ``scales`` the stored scales.
        shards: names of the modules in the file that it is joined from.
    """
    given = job.get("amplitudes") or {}
    if name in given:
        return float(given[name])
    scale = getattr(module, "input_scale", None)
    if isinstance(scale, Tensor) and scale.is_floating_point() and scale.numel():
        return _STEPS * float(scale.detach().float().max())
    stored = [job["scales"][one] for one in shards if one in job["scales"]]
    return _STEPS * max(stored) if stored else 1.0


def chosen_ids(name: str, rows: int, vocabulary: int) -> Tensor:
    """Token ids ``[rows]`` of an embedding, the same for a name in every process."""
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, vocabulary, (rows,), generator=source)
