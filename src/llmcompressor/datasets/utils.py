# SPDX-License-Identifier: Apache-2.0
"""Import path for scripts that prepare calibration batches themselves."""

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
