# SPDX-License-Identifier: Apache-2.0
"""transformers' flag for models with quantized weights, which some forwards check.

Mamba's blocks multiply by the weight of ``dt_proj`` directly, unless the model is quantized: then
they call the Linear. A quantized checkpoint is loaded that way, so it is calibrated that way, and
the model in memory computes what the loaded one will.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

__all__ = ["mark_quantized", "marked_quantized"]

_MARK = "_is_quantized"


def mark_quantized(model: Module) -> None:
    """Mark each configuration of ``model`` as quantized, as transformers does."""
    for config in _configs(model):
        setattr(config, _MARK, True)


@contextlib.contextmanager
def marked_quantized(model: Module) -> Iterator[None]:
    """Apply :func:`mark_quantized` while the body runs."""
    unmarked = [config for config in _configs(model) if not hasattr(config, _MARK)]
    mark_quantized(model)
    try:
        yield
    finally:
        for config in unmarked:
            vars(config).pop(_MARK, None)


def _configs(model: Module) -> list[Any]:
    found = {id(one): one for one in (getattr(each, "config", None) for each in model.modules())}
    return [one for one in found.values() if hasattr(one, "to_diff_dict")]
