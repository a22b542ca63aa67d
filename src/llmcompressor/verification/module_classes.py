# SPDX-License-Identifier: Apache-2.0
"""What a module is, by its class: the model that ``config.json`` names is built without data.

The names of a file tell a Linear from an embedding most of the time only: ``patch_embedding`` is a
Linear in some models, and ``embed`` an embedding in others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from llmcompressor.verification.built import bare_model, stored_names

__all__ = ["kind_by_class"]


def kind_by_class(config: Mapping[str, Any]) -> Callable[[str], str] | None:
    """Ask the class of a configuration what its modules are.

    Args:
        config: the content of ``config.json``.

    Returns:
        Path of a module in the file → ``linear``, ``embedding``, ``other`` (a norm), or nothing
        where the class has no such module, or one of a class of its own. ``None`` where the
        class cannot be built.
    """
    plain = {key: value for key, value in config.items() if key not in _OF_CODES}
    try:
        text = json.dumps(plain, sort_keys=True)
    except TypeError:  # what is no JSON was in no file
        return None
    return _asked(text)


_OF_CODES = frozenset({"quantization_config", "compression_config"})


@lru_cache(maxsize=2)  # the check before a run asks once for each server
def _asked(config: str) -> Callable[[str], str] | None:
    model = bare_model(json.loads(config))
    if model is None:
        return None
    stored = stored_names(model)
    kinds = {name: _kind(module) for name, module in model.named_modules()}

    def kind(path: str) -> str:
        return kinds.get(stored(f"{path}.weight").rpartition(".")[0], kinds.get(path, ""))

    return kind


def _kind(module: torch.nn.Module) -> str:
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    if isinstance(module, torch.nn.Linear):
        return "linear"
    return "other" if "norm" in type(module).__name__.lower() else ""
