# SPDX-License-Identifier: Apache-2.0
"""Removed names for Granite 4 experts, with the reason that their import reports."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_BY_ITSELF = (
    "each run takes the experts of a model apart by itself. Load the model as it is, and leave out "
    "what replaces its experts."
)
_ABSENT = {
    "GraniteMoeHybridParallelExpertsLinear": _BY_ITSELF,
    "pack_3d_experts": (
        "servers read quantized experts one by one, and so they are written. Save the model as it "
        "is."
    ),
    "replace_granite_moe_with_linear_experts": _BY_ITSELF,
}

__getattr__, __dir__ = lazy_page(globals(), {}, _ABSENT)
