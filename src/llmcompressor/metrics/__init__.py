# SPDX-License-Identifier: Apache-2.0
"""Metric loggers of a run: Python's log, TensorBoard, Weights & Biases, a function."""

from llmcompressor.metrics.loggers import (
    BaseLogger,
    Entry,
    LambdaLogger,
    LoggerManager,
    PythonLogger,
    SparsificationGroupLogger,
    TensorBoardLogger,
    WANDBLogger,
)

__all__ = [
    "BaseLogger",
    "Entry",
    "LambdaLogger",
    "LoggerManager",
    "PythonLogger",
    "SparsificationGroupLogger",
    "TensorBoardLogger",
    "WANDBLogger",
]
