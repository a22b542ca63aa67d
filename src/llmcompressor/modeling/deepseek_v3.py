# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of an MoE class for calibration, now transformers' own class."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_HOMES = {
    "CalibrationDeepseekV3MoE": (
        "transformers.models.deepseek_v3.modeling_deepseek_v3:DeepseekV3MoE"
    ),
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
