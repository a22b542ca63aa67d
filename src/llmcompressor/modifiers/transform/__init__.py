# SPDX-License-Identifier: Apache-2.0
"""Modifiers that leave what a model computes as it is, and make it easier to quantize."""

from __future__ import annotations

from typing import Any

from llmcompressor.registry import resolve

__all__ = [
    "AWQMapping",
    "AWQModifier",
    "QuIPModifier",
    "SmoothQuantMapping",
    "SmoothQuantModifier",
    "SpinQuantModifier",
]

_HOMES = {
    "AWQMapping": "llmcompressor.modifiers.transform.awq:AWQMapping",
    "AWQModifier": "llmcompressor.modifiers.transform.awq:AWQModifier",
    "QuIPModifier": "llmcompressor.modifiers.rotation:QuIPModifier",
    "SmoothQuantMapping": "llmcompressor.modifiers.transform.smoothquant:SmoothQuantMapping",
    "SmoothQuantModifier": "llmcompressor.modifiers.transform.smoothquant:SmoothQuantModifier",
    "SpinQuantModifier": "llmcompressor.modifiers.rotation:SpinQuantModifier",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve(_HOMES[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
