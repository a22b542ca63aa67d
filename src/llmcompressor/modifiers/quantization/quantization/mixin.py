# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.quantization.base` has."""

from llmcompressor.quantization.base import QuantizationMixin

__all__ = ["QuantizationMixin"]
