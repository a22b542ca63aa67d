# SPDX-License-Identifier: Apache-2.0
"""GPTQ (arXiv:2210.17323)."""

from llmcompressor.modifiers.gptq.base import GPTQModifier

__all__ = ["GPTQModifier"]
