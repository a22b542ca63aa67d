# SPDX-License-Identifier: Apache-2.0
"""The model without data that several rules ask, built once for all servers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llmcompressor.verification.built import bare_model

__all__ = ["class_model", "passes_over"]

_OF_CODES = frozenset({"quantization_config", "compression_config"})
_LAYER = re.compile(r"(?:.*\.)?(?:layers?|h|blocks?)\.\d+\.")


def class_model(config: Mapping[str, Any]) -> Any:
    """The model of a ``config.json``, not quantized; ``None`` where it cannot be built.

    It is shared by all who ask: nothing of it may be changed.
    """
    try:
        text = json.dumps(
            {key: each for key, each in config.items() if key not in _OF_CODES}, sort_keys=True
        )
    except TypeError:  # what is no JSON was in no file
        return None
    return _of(text)


@lru_cache(maxsize=4)  # the check before a run asks once for each server, and for the text alone
def _of(config: str) -> Any:
    return bare_model(json.loads(config))


def passes_over(config: Mapping[str, Any], name: str) -> bool:
    """Whether the class leaves out a tensor of a layer that it has, and says so beforehand.

    A layer that it has not, as one that drafts tokens, may be one of another class's.
    """
    model, layer = class_model(config), _LAYER.match(name)
    if model is None or layer is None:
        return False
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(one, name) for one in patterns) and any(
        each.startswith(layer.group()) for each, _ in model.named_parameters()
    )
