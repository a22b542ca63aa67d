# SPDX-License-Identifier: Apache-2.0
"""The path under which scripts import what they make calibration batches with."""

from __future__ import annotations

from llmcompressor.datasets.collate import DataCollatorWithTruncation
from llmcompressor.datasets.sampling import LengthAwareSampler, get_rank_partition
from llmcompressor.datasets.scripts import (
    format_calibration_data,
    get_calibration_dataloader,
    get_processed_dataset,
)

__all__ = [
    "DataCollatorWithTruncation",
    "LengthAwareSampler",
    "format_calibration_data",
    "get_calibration_dataloader",
    "get_processed_dataset",
    "get_rank_partition",
]
