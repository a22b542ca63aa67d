# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.smoothquant` has."""

from llmcompressor.modifiers.smoothquant import LogarithmicEqualizationModifier

__all__ = ["LogarithmicEqualizationModifier"]
