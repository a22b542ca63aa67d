# SPDX-License-Identifier: Apache-2.0
"""Calibration pipelines: the ways of running calibration data through a model.

A pipeline reads the traits that modifiers declare and fires events; it knows no modifier by name
and does no mathematics.
"""

from typing import TYPE_CHECKING

from llmcompressor.pipelines.registry import PIPELINES, CalibrationPipeline, infer_pipeline
from llmcompressor.runtime.registry import lazy_exports

if TYPE_CHECKING:
    from llmcompressor.pipelines.basic import BasicPipeline, DataFreePipeline, IndependentPipeline
    from llmcompressor.pipelines.sequential import SequentialPipeline

__all__ = [
    "PIPELINES",
    "BasicPipeline",
    "CalibrationPipeline",
    "DataFreePipeline",
    "IndependentPipeline",
    "SequentialPipeline",
    "infer_pipeline",
]

_HOMES = {
    "BasicPipeline": "llmcompressor.pipelines.basic:BasicPipeline",
    "DataFreePipeline": "llmcompressor.pipelines.basic:DataFreePipeline",
    "IndependentPipeline": "llmcompressor.pipelines.basic:IndependentPipeline",
    "SequentialPipeline": "llmcompressor.pipelines.sequential:SequentialPipeline",
}

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
