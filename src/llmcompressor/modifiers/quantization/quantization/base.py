# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.quantization.rounding` has."""

from llmcompressor.modifiers.quantization.rounding import QuantizationModifier

__all__ = ["QuantizationModifier"]
