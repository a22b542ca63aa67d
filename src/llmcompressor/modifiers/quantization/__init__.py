# SPDX-License-Identifier: Apache-2.0
"""Quantization: rounding to nearest, and GPTQ under the path it also has."""

from __future__ import annotations

from typing import Any

from llmcompressor.registry import resolve

__all__ = ["GPTQModifier", "QuantizationMixin", "QuantizationModifier"]

_HOMES = {
    "GPTQModifier": "llmcompressor.modifiers.gptq:GPTQModifier",
    "QuantizationMixin": "llmcompressor.quantization.base:QuantizationMixin",
    "QuantizationModifier": "llmcompressor.modifiers.quantization.rounding:QuantizationModifier",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve(_HOMES[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
