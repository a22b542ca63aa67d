# SPDX-License-Identifier: Apache-2.0
"""Who runs what when: the ways of carrying calibration data through a model.

A pipeline reads what modifiers declare and fires events; it knows no modifier by name and does
no mathematics.
"""

from llmcompressor.pipelines.registry import PIPELINES, CalibrationPipeline, infer_pipeline

__all__ = ["PIPELINES", "CalibrationPipeline", "infer_pipeline"]
