# SPDX-License-Identifier: Apache-2.0
"""Old path of a class for calibration: no mixture is replaced, so it is transformers' own."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_HOMES = {
    "CalibrationGlmMoeDsaMoE": (
        "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa:GlmMoeDsaMoE"
    ),
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
