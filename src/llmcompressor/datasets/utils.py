# SPDX-License-Identifier: Apache-2.0
"""The path under which scripts import :func:`get_rank_partition`."""

from __future__ import annotations

from llmcompressor.datasets.sampling import get_rank_partition

__all__ = ["get_rank_partition"]
