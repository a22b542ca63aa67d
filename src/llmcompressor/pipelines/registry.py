# SPDX-License-Identifier: Apache-2.0
"""The pipelines by name, and which one a recipe needs."""

from __future__ import annotations

from collections.abc import Sequence

from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.registry import Table

__all__ = ["PIPELINES", "infer_pipeline"]

PIPELINES = Table(
    "pipeline",
    {
        "basic": "llmcompressor.pipelines.basic:BasicPipeline",
        "datafree": "llmcompressor.pipelines.basic:DataFreePipeline",
        "data_free": "llmcompressor.pipelines.basic:DataFreePipeline",
        "independent": "llmcompressor.pipelines.independent:IndependentPipeline",
        "sequential": "llmcompressor.pipelines.sequential:SequentialPipeline",
        "layer_sequential": "llmcompressor.pipelines.sequential:LayerSequentialPipeline",
    },
)


def infer_pipeline(modifiers: Sequence[Modifier]) -> str:
    """``"sequential"`` if data has to run through for any of ``modifiers``, else ``"datafree"``."""
    collects = any(modifier.collects for modifier in modifiers)
    return "sequential" if collects else "datafree"
