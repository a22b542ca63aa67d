# SPDX-License-Identifier: Apache-2.0
"""What there is no such thing of: a class of experts that are taken apart."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_ABSENT = {
    "LinearExperts2D": (
        "each run takes the experts of a model apart by itself. Load the model as it is."
    ),
}

__getattr__, __dir__ = lazy_page(globals(), {}, _ABSENT)
