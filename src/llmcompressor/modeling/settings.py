# SPDX-License-Identifier: Apache-2.0
"""Attributes of a model's configuration, also where they differ by layer."""

from __future__ import annotations

from typing import Any

__all__ = ["setting", "text_config"]


def text_config(config: Any) -> Any:
    """The text configuration of a model; that of the decoder where there are several.

    Args:
        config: of transformers; one without parts is returned itself.
    """
    find = getattr(config, "get_text_config", None)
    if find is None:
        return config
    try:
        return find()
    except ValueError:  # MusicGen has a text encoder, and a decoder of audio tokens
        return find(decoder=True)


def setting(config: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute of a configuration; where it differs by layer, the largest value.

    Args:
        config: of transformers, or ``None``.
        name: of the attribute.
        otherwise: the default.
    """
    try:
        return getattr(config, name, otherwise)
    except Exception:  # some answer for single layers alone, as Gemma 4 does for head_dim
        layers = getattr(config, "per_layer_config", ())
        values = [getattr(layer, name, None) for layer in layers]
        numbers = [value for value in values if isinstance(value, int | float)]
        return max(numbers, default=otherwise)
