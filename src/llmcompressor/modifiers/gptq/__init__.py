# SPDX-License-Identifier: Apache-2.0
"""GPTQ: weight quantization with error compensation (arXiv:2210.17323)."""

from llmcompressor.modifiers.gptq.base import GPTQModifier

__all__ = ["GPTQModifier"]
