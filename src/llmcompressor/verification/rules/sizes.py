# SPDX-License-Identifier: Apache-2.0
"""The numbers of ``config.json`` that every reader builds the model from (C3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcompressor.verification.rules.base import CONFIG, Problem, Rule, View

__all__ = ["RULES", "sizes_are_positive"]

_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_REMEDY = "Take it from the config.json of the original model."


def sizes_are_positive(view: View) -> Iterator[Problem]:
    """C3."""
    for place, part in _parts(view.config):
        for key in _SIZES:
            reason = _reason(part[key]) if key in part else ""
            if reason:
                yield Problem(f"{place}{key}", reason, _REMEDY)


def _parts(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration and those of the models within it, which name a ``model_type`` too."""
    yield place, config
    for key, value in config.items():
        if isinstance(value, Mapping) and ("model_type" in value or key == "text_config"):
            yield from _parts(value, f"{place}{key}.")


def _reason(value: object) -> str:
    """What is wrong with a size: empty if nothing is said, or it is said layer by layer."""
    if value is None or isinstance(value, (list, Mapping)):
        return ""
    if isinstance(value, bool) or not isinstance(value, int):
        return f"It is {value!r}, and no whole number."
    if value < 1:
        return f"It is {value}, and a model has one at least."
    return ""


RULES = (
    Rule(
        "C3",
        "sizes of config.json are positive",
        sizes_are_positive,
        server="",
        needs=CONFIG,
    ),
)
