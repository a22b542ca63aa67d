# SPDX-License-Identifier: Apache-2.0
"""Alias of the modifier base class."""

from llmcompressor.modifiers.modifier import Modifier as ModifierInterface

__all__ = ["ModifierInterface"]
