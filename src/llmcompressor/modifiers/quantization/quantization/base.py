# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.quantization.rounding`."""

from llmcompressor.modifiers.quantization.rounding import QuantizationModifier

__all__ = ["QuantizationModifier"]
