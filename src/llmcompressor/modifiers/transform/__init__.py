# SPDX-License-Identifier: Apache-2.0
"""Transforms that preserve a model's function and make it easier to quantize."""

from __future__ import annotations

from llmcompressor.runtime.registry import lazy_exports

__all__ = [
    "AWQMapping",
    "AWQModifier",
    "IMatrixGatherer",
    "QuIPModifier",
    "SmoothQuantMapping",
    "SmoothQuantModifier",
    "SpinQuantModifier",
]

_HOMES = {
    "AWQMapping": "llmcompressor.modifiers.transform.awq:AWQMapping",
    "AWQModifier": "llmcompressor.modifiers.transform.awq:AWQModifier",
    "IMatrixGatherer": "llmcompressor.modifiers.transform.imatrix:IMatrixGatherer",
    "QuIPModifier": "llmcompressor.modifiers.rotation:QuIPModifier",
    "SmoothQuantMapping": "llmcompressor.modifiers.transform.smoothquant:SmoothQuantMapping",
    "SmoothQuantModifier": "llmcompressor.modifiers.transform.smoothquant:SmoothQuantModifier",
    "SpinQuantModifier": "llmcompressor.modifiers.rotation:SpinQuantModifier",
}

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
