# SPDX-License-Identifier: Apache-2.0
"""Round-trip check that a quantized weight still matches its codes and scales when written.

Codes are computed from the weight in memory and the scales that it was rounded with. If the weight
was changed since, the file would silently hold another weight than the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from llmcompressor.checkpoint.codes import codes_of
from llmcompressor.checkpoint.compress import QuantizedModule
from llmcompressor.logger import logger
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.scales import effective_scale, smallest_of
from llmcompressor.schemes.bridge import grid_of, partition_of
from llmcompressor.wording import listed

__all__ = ["is_on_grid", "warn_cast", "warn_off_grid"]

_OF_A_STEP = 0.25
_OF_A_FLOAT = 2.0**-6
"""Off by more of its size, a float of eight bits or fewer was not rounded to one."""
_OF_A_VALUE = 2.0**-7
"""Codes less their zero point, and what they stand for, were rounded to the model's dtype:
bfloat16 may be off by 2^-9 of each, and a scale in it too."""
_LEAST = 2.0**-12


def is_on_grid(entry: QuantizedModule, own: Mapping[str, Tensor]) -> bool:
    """Return True if a module's weight equals its quantized and dequantized value.

    Args:
        entry: the module and its scheme.
        own: own name → tensor, as for :func:`.compress.compress`.

    Returns:
        True too for a weight that is not rounded yet or has no data.
    """
    weights, weight = entry.scheme.weights, own.get("weight")
    if entry.is_raw or entry.is_attention or weights is None or weight is None:
        return True
    if weight.is_meta or weight.ndim != 2 or "weight_scale" not in own:
        return True
    grid, wide = grid_of(weights), torch.float32
    scale = effective_scale(own["weight_scale"].to(wide), own.get("weight_global_scale"))
    zero = None if weights.symmetric else own["weight_zero_point"]
    if weights.strategy == "tensor":
        scale, zero = scale.reshape(1), None if zero is None else zero.reshape(1)

    # the spacing of a dtype's subnormal numbers
    apart = smallest_of(weight.dtype)

    def far(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return _is_far(grid, x.to(wide), scale, zero, apart).to(wide)

    off = codes_of(weight, scale, zero, far, partition_of(weights), _any_of_row)
    return not bool(off.any())


def warn_off_grid(names: Iterable[str]) -> None:
    """Warn of weights that changed after they were quantized."""
    names = list(names)
    if names:
        logger.warning(
            f"Something has changed the weights of {listed(names)} after they were quantized: "
            "they are stored as the nearest that their scales can hold, which is not what the "
            "model in memory computes with. Change weights before the modifier that quantizes them."
        )


def warn_cast(dtype: torch.dtype, before: torch.dtype | None) -> None:
    """Warn if a model was cast after it was quantized.

    Args:
        dtype: the model's dtype.
        before: its dtype when it was quantized; ``None`` if unknown or not quantized.
    """
    if before is not None and dtype is not before:
        names = [str(one).removeprefix("torch.") for one in (before, dtype)]
        logger.warning(
            f"The model was cast from {names[0]} to {names[1]} after it was quantized: weights and "
            "scales were rounded once more, so that readers compute something else than the model "
            f"in memory. Quantize it in {names[1]} (precision={names[1]!r})."
        )


def _is_far(grid: Grid, x: Tensor, scale: Tensor, zero: Tensor | None, apart: float) -> Tensor:
    distance = (x - grid.fake_quantize(x, scale, zero)).abs()
    if grid.kind == "float":
        return distance > _OF_A_FLOAT * x.abs() + _LEAST * scale + apart / 2
    return distance > _OF_A_STEP * scale + _OF_A_VALUE * x.abs()


def _any_of_row(far: Tensor) -> Tensor:
    return far.any(-1, keepdim=True)
