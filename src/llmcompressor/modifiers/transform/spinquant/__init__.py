# SPDX-License-Identifier: Apache-2.0
"""SpinQuant: rotations of a language model (arXiv:2405.16406)."""

from llmcompressor.modifiers.rotation import NormMapping, SpinQuantMapping, SpinQuantModifier

__all__ = ["NormMapping", "SpinQuantMapping", "SpinQuantModifier"]
