# SPDX-License-Identifier: Apache-2.0
"""Old path of a class for calibration: no mixture is replaced, so it is transformers' own."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_HOMES = {
    "SequentialLlama4TextMoe": "transformers.models.llama4.modeling_llama4:Llama4TextMoe",
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
