# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant: activation smoothing (arXiv:2211.10438)."""

from llmcompressor.modifiers.smoothquant import SmoothQuantMapping, SmoothQuantModifier

__all__ = ["SmoothQuantMapping", "SmoothQuantModifier"]
