# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of an MoE class for calibration, now transformers' own class."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_HOMES = {
    "CalibrationQwen3_5MoeSparseMoeBlock": (
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeSparseMoeBlock"
    ),
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
