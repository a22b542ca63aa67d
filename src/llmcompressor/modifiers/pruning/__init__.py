# SPDX-License-Identifier: Apache-2.0
"""Pruning: over time, while a model is trained, and at once, by calibration data."""

from __future__ import annotations

from typing import Any

from llmcompressor.registry import resolve

__all__ = [
    "ConstantPruningModifier",
    "GradualPruningModifier",
    "MagnitudePruningModifier",
    "REAPPruningModifier",
    "SparseGPTModifier",
    "WandaPruningModifier",
]

_HOMES = {
    "ConstantPruningModifier": "llmcompressor.modifiers.pruning.constant:ConstantPruningModifier",
    "GradualPruningModifier": "llmcompressor.modifiers.pruning.magnitude:MagnitudePruningModifier",
    "MagnitudePruningModifier": (
        "llmcompressor.modifiers.pruning.magnitude:MagnitudePruningModifier"
    ),
    "REAPPruningModifier": "llmcompressor.modifiers.reap:REAPPruningModifier",
    "SparseGPTModifier": "llmcompressor.modifiers.sparsity.sparsegpt:SparseGPTModifier",
    "WandaPruningModifier": "llmcompressor.modifiers.sparsity.wanda:WandaPruningModifier",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve(_HOMES[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
