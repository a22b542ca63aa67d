# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.sparsity.sparsegpt`."""

from llmcompressor.modifiers.sparsity.sparsegpt import SparseGPTModifier

__all__ = ["SparseGPTModifier"]
