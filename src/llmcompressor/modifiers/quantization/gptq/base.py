# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.gptq.base` has."""

from llmcompressor.modifiers.gptq.base import GPTQModifier

__all__ = ["GPTQModifier"]
