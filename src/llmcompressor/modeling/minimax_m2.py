# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of an MoE class for calibration, now transformers' own class."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_HOMES = {
    "CalibrationMiniMaxM2SparseMoeBlock": (
        "transformers.models.minimax_m2.modeling_minimax_m2:MiniMaxM2SparseMoeBlock"
    ),
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
