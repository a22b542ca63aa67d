# SPDX-License-Identifier: Apache-2.0
"""Wanda under an old path."""

from llmcompressor.modifiers.sparsity.wanda import WandaPruningModifier

__all__ = ["WandaPruningModifier"]
