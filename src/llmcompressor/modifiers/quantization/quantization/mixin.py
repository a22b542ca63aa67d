# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.quantization.base`."""

from llmcompressor.quantization.base import QuantizationMixin

__all__ = ["QuantizationMixin"]
