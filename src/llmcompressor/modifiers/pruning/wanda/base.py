# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.sparsity.wanda` has."""

from llmcompressor.modifiers.sparsity.wanda import WandaPruningModifier

__all__ = ["WandaPruningModifier"]
