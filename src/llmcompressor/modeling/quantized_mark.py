# SPDX-License-Identifier: Apache-2.0
"""What transformers notes of a model whose weights are quantized, and some forwards ask for.

Mamba's blocks multiply by the weight of ``dt_proj`` themselves, unless the model is quantized: then
they call the Linear. A quantized checkpoint is read that way, so it is calibrated that way, and
what is left in memory computes what will be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

__all__ = ["mark_quantized", "marked_quantized"]

_MARK = "_is_quantized"


def mark_quantized(model: Module) -> None:
    """Note in each configuration of ``model`` that it is quantized, as transformers does."""
    for config in _configs(model):
        setattr(config, _MARK, True)


@contextlib.contextmanager
def marked_quantized(model: Module) -> Iterator[None]:
    """:func:`mark_quantized` for the time of the body."""
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
