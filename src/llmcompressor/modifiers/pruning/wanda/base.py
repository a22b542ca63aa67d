# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.sparsity.wanda`."""

from llmcompressor.modifiers.sparsity.wanda import WandaPruningModifier

__all__ = ["WandaPruningModifier"]
