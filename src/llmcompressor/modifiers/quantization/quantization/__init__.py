# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.quantization` has."""

from llmcompressor.modifiers.quantization.rounding import QuantizationModifier
from llmcompressor.quantization.base import QuantizationMixin

__all__ = ["QuantizationMixin", "QuantizationModifier"]
