# SPDX-License-Identifier: Apache-2.0
"""Pruning by magnitude, more and more of a model while it is trained."""

from llmcompressor.modifiers.pruning.magnitude.base import MagnitudePruningModifier

__all__ = ["MagnitudePruningModifier"]
