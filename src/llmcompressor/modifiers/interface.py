# SPDX-License-Identifier: Apache-2.0
"""Other name of the class that all modifiers derive from."""

from llmcompressor.modifiers.modifier import Modifier as ModifierInterface

__all__ = ["ModifierInterface"]
