# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of an MoE class for calibration, now transformers' own class."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_HOMES = {
    "CalibrationGlm4MoeMoE": "transformers.models.glm4_moe.modeling_glm4_moe:Glm4MoeMoE",
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
