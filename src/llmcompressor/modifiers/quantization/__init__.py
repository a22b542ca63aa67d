# SPDX-License-Identifier: Apache-2.0
"""Round-to-nearest quantization, and the compatibility path of GPTQ."""

from __future__ import annotations

from llmcompressor.runtime.registry import lazy_exports

__all__ = ["GPTQModifier", "QuantizationMixin", "QuantizationModifier"]

_HOMES = {
    "GPTQModifier": "llmcompressor.modifiers.gptq:GPTQModifier",
    "QuantizationMixin": "llmcompressor.quantization.base:QuantizationMixin",
    "QuantizationModifier": "llmcompressor.modifiers.quantization.rounding:QuantizationModifier",
}

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
