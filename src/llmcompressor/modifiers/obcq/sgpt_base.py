# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.sparsity.sparsegpt` has."""

from llmcompressor.modifiers.sparsity.sparsegpt import SparseGPTModifier

__all__ = ["SparseGPTModifier"]
