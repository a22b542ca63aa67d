# SPDX-License-Identifier: Apache-2.0
"""SparseGPT (arXiv:2301.00774) and Wanda (arXiv:2306.11695): one-shot pruning."""

from llmcompressor.modifiers.sparsity.sparsegpt import SparseGPTModifier
from llmcompressor.modifiers.sparsity.wanda import WandaPruningModifier

__all__ = ["SparseGPTModifier", "WandaPruningModifier"]
