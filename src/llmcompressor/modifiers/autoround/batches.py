# SPDX-License-Identifier: Apache-2.0
"""Batch preparation that AutoRound scripts call."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["fix_batch_if_needed"]

_Batch = TypeVar("_Batch")


def fix_batch_if_needed(batch: _Batch) -> _Batch:
    """Return the batch unchanged: its mask determines which tokens count."""
    return batch
