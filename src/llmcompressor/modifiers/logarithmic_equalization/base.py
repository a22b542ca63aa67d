# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.smoothquant`."""

from llmcompressor.modifiers.smoothquant import LogarithmicEqualizationModifier

__all__ = ["LogarithmicEqualizationModifier"]
