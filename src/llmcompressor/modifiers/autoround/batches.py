# SPDX-License-Identifier: Apache-2.0
"""What scripts do to their data for AutoRound."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["fix_batch_if_needed"]

_Batch = TypeVar("_Batch")


def fix_batch_if_needed(batch: _Batch) -> _Batch:
    """The batch, as it is: its mask says which tokens count, whatever it looks like."""
    return batch
