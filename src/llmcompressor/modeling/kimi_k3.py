# SPDX-License-Identifier: Apache-2.0
"""Removed names of Kimi K3's code, with the reason that their import reports."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_ABSENT = {
    "KimiK3ForConditionalGeneration": (
        "it holds no model's code. Load the model with transformers, with trust_remote_code=True "
        "if the checkpoint brings its code."
    ),
}

__getattr__, __dir__ = lazy_page(globals(), {}, _ABSENT)
