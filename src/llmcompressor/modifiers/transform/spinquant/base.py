# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.rotation`."""

from llmcompressor.modifiers.rotation import SpinQuantModifier

__all__ = ["SpinQuantModifier"]
