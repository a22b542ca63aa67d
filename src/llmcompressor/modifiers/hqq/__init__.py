# SPDX-License-Identifier: Apache-2.0
"""Half-quadratic quantization: no data, scales and zero points refined."""

from llmcompressor.modifiers.hqq.base import HQQModifier

__all__ = ["HQQModifier"]
