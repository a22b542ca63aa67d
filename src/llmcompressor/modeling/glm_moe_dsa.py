# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of an MoE class for calibration, now transformers' own class."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_HOMES = {
    "CalibrationGlmMoeDsaMoE": (
        "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa:GlmMoeDsaMoE"
    ),
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
