# SPDX-License-Identifier: Apache-2.0
"""Scale tuning: scales and norms trained with frozen codes, after the weights are quantized."""

from llmcompressor.modifiers.scale_tuning.base import ScaleTuningModifier

__all__ = ["ScaleTuningModifier"]
