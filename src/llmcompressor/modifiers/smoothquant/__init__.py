# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant (arXiv:2211.10438) and log equalization."""

from llmcompressor.modifiers.smoothquant.base import (
    LogarithmicEqualizationModifier,
    SmoothQuantMapping,
    SmoothQuantModifier,
)

__all__ = ["LogarithmicEqualizationModifier", "SmoothQuantMapping", "SmoothQuantModifier"]
