# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.smoothquant.base`."""

from llmcompressor.modifiers.smoothquant.base import SmoothQuantMapping, SmoothQuantModifier

__all__ = ["SmoothQuantMapping", "SmoothQuantModifier"]
