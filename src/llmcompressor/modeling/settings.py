# SPDX-License-Identifier: Apache-2.0
"""What a configuration says, also where it says it for each layer."""

from __future__ import annotations

from typing import Any

__all__ = ["setting", "text_config"]


def text_config(config: Any) -> Any:
    """The configuration of the text in a model; of several texts, that which a decoder writes.

    Args:
        config: of transformers; one that knows of no parts is given back.
    """
    find = getattr(config, "get_text_config", None)
    if find is None:
        return config
    try:
        return find()
    except ValueError:  # MusicGen has an encoder of text, and a decoder of what is made of it
        return find(decoder=True)


def setting(config: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute of a configuration; where it differs by layer, the largest of the numbers.

    Args:
        config: of transformers, or ``None``.
        name: of the attribute.
        otherwise: what it is where there is none.
    """
    try:
        return getattr(config, name, otherwise)
    except Exception:  # some answer for single layers alone, as Gemma 4 does for head_dim
        layers = getattr(config, "per_layer_config", ())
        values = [getattr(layer, name, None) for layer in layers]
        numbers = [value for value in values if isinstance(value, int | float)]
        return max(numbers, default=otherwise)
