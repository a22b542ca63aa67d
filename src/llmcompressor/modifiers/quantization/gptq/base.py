# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.gptq.base`."""

from llmcompressor.modifiers.gptq.base import GPTQModifier

__all__ = ["GPTQModifier"]
