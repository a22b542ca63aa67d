# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :class:`llmcompressor.modifiers.gptq.GPTQModifier`."""

from llmcompressor.modifiers.gptq import GPTQModifier

__all__ = ["GPTQModifier"]
