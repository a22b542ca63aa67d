# SPDX-License-Identifier: Apache-2.0
"""Pruning: gradual during a training, or one-shot with calibration data."""

from __future__ import annotations

from llmcompressor.runtime.registry import lazy_exports

__all__ = [
    "ConstantPruningModifier",
    "GradualPruningModifier",
    "MagnitudePruningModifier",
    "REAPPruningModifier",
    "SparseGPTModifier",
    "WandaPruningModifier",
]

_HOMES = {
    "ConstantPruningModifier": "llmcompressor.modifiers.pruning.gradual:ConstantPruningModifier",
    "GradualPruningModifier": "llmcompressor.modifiers.pruning.gradual:MagnitudePruningModifier",
    "MagnitudePruningModifier": (
        "llmcompressor.modifiers.pruning.gradual:MagnitudePruningModifier"
    ),
    "REAPPruningModifier": "llmcompressor.modifiers.reap:REAPPruningModifier",
    "SparseGPTModifier": "llmcompressor.modifiers.sparsity.sparsegpt:SparseGPTModifier",
    "WandaPruningModifier": "llmcompressor.modifiers.sparsity.wanda:WandaPruningModifier",
}

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
