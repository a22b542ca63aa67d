# SPDX-License-Identifier: Apache-2.0
"""Compatibility path for loading an MoE for compression, and for unfusing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.modeling import replace_modules_for_calibration as linearize_moe
from llmcompressor.registry import lazy_page

if TYPE_CHECKING:
    from llmcompressor.utils.loading import load_context as load_quantizable_moe

__all__ = ["linearize_moe", "load_quantizable_moe"]

_HOMES = {"load_quantizable_moe": "llmcompressor.utils.loading:load_context"}
_ABSENT = {
    "repack_moe": (
        "servers read quantized experts one by one, and so they are written. Save the model as it "
        "is."
    ),
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES, _ABSENT)
