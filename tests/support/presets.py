# SPDX-License-Identifier: Apache-2.0
"""Presets that tests go through."""

from __future__ import annotations

from llmcompressor.schemes.presets import PRESETS

__all__ = ["LIKE_OTHERS", "USUAL", "WITH_WEIGHTS"]

WITH_WEIGHTS = [name for name, preset in PRESETS.items() if preset.weights is not None]
"""Names of the presets that quantize weights."""

LIKE_OTHERS = [
    name
    for name in WITH_WEIGHTS
    if name[:2] in ("W2", "W5", "W6") or name in ("W7A16_ASYM", "W7A8", "W3A4", "INT8")
]
"""Those of which another one has the format, and differs in nothing but its bits."""

USUAL = [name for name in WITH_WEIGHTS if name not in LIKE_OTHERS]
