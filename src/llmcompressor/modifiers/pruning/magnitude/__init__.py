# SPDX-License-Identifier: Apache-2.0
"""Gradual magnitude pruning during a training."""

from llmcompressor.modifiers.pruning.magnitude.base import MagnitudePruningModifier

__all__ = ["MagnitudePruningModifier"]
