# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.quantization`."""

from llmcompressor.modifiers.quantization.rounding import QuantizationModifier
from llmcompressor.quantization.base import QuantizationMixin

__all__ = ["QuantizationMixin", "QuantizationModifier"]
