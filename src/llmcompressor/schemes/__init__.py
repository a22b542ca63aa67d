# SPDX-License-Identifier: Apache-2.0
"""Quantization schemes: presets, a modifier's fields resolved, checks against a model.

Names are imported when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.runtime.registry import lazy_exports

if TYPE_CHECKING:
    from llmcompressor.schemes.checks import check_schemes
    from llmcompressor.schemes.presets import PRESETS, format_of, is_preset, preset_scheme
    from llmcompressor.schemes.resolve import ResolvedSchemes, resolve_schemes

__all__ = [
    "PRESETS",
    "ResolvedSchemes",
    "check_schemes",
    "format_of",
    "is_preset",
    "preset_scheme",
    "resolve_schemes",
]

_HOMES = {
    "PRESETS": ".presets",
    "ResolvedSchemes": ".resolve",
    "check_schemes": ".checks",
    "format_of": ".presets",
    "is_preset": ".presets",
    "preset_scheme": ".presets",
    "resolve_schemes": ".resolve",
}

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
