# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of an MoE class for calibration, now transformers' own class."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_HOMES = {
    "SequentialLlama4TextMoe": "transformers.models.llama4.modeling_llama4:Llama4TextMoe",
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
