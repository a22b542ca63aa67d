# SPDX-License-Identifier: Apache-2.0
"""Rotations (SpinQuant, QuIP) that make weights and activations easier to quantize."""

from llmcompressor.modifiers.rotation.parts import NormMapping, SpinQuantMapping
from llmcompressor.modifiers.rotation.quip import QuIPModifier
from llmcompressor.modifiers.rotation.spinquant import SpinQuantModifier

__all__ = ["NormMapping", "QuIPModifier", "SpinQuantMapping", "SpinQuantModifier"]
