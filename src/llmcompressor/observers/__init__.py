# SPDX-License-Identifier: Apache-2.0
"""Observers: statistics of tensors, and the scales and zero points computed from them."""

from __future__ import annotations

from llmcompressor.observers.base import Observer, ObserverOptions, fused_global_scale
from llmcompressor.observers.canonical import flatten_for_calibration
from llmcompressor.observers.histogram import (
    EntropyObserver,
    HistogramObserver,
    PercentileObserver,
)
from llmcompressor.observers.imatrix import IMatrixMSEObserver, NVFP4ExpandedIMatrixObserver
from llmcompressor.observers.min_max import (
    MemorylessMinMaxObserver,
    MinMaxObserver,
    StaticMinMaxObserver,
)
from llmcompressor.observers.mse import (
    MemorylessMSEObserver,
    MovingAverageMSEObserver,
    MSEObserver,
    NVFP4ExpandedMSEObserver,
)

__all__ = [
    "EntropyObserver",
    "HistogramObserver",
    "IMatrixMSEObserver",
    "MSEObserver",
    "MemorylessMSEObserver",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MovingAverageMSEObserver",
    "NVFP4ExpandedIMatrixObserver",
    "NVFP4ExpandedMSEObserver",
    "Observer",
    "ObserverOptions",
    "PercentileObserver",
    "StaticMinMaxObserver",
    "flatten_for_calibration",
    "fused_global_scale",
]
