# SPDX-License-Identifier: Apache-2.0
"""Removed class of unfused experts, with the reason that its import reports."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_ABSENT = {
    "LinearExperts2D": (
        "each run takes the experts of a model apart by itself. Load the model as it is."
    ),
}

__getattr__, __dir__ = lazy_page(globals(), {}, _ABSENT)
