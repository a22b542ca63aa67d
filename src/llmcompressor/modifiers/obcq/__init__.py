# SPDX-License-Identifier: Apache-2.0
"""SparseGPT under an old path."""

from llmcompressor.modifiers.sparsity.sparsegpt import SparseGPTModifier

__all__ = ["SparseGPTModifier"]
