# SPDX-License-Identifier: Apache-2.0
"""HQQ: data-free half-quadratic quantization."""

from llmcompressor.modifiers.hqq.base import HQQModifier

__all__ = ["HQQModifier"]
