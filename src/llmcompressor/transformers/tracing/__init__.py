# SPDX-License-Identifier: Apache-2.0
"""``Traceable…`` names of model classes.

Nothing is traced here, so each is the plain class of transformers:
``TraceableLlavaForConditionalGeneration`` is ``transformers.LlavaForConditionalGeneration``.
"""

from __future__ import annotations

from typing import Any

import transformers

_PREFIX = "Traceable"


def __getattr__(name: str) -> Any:
    plain = name.removeprefix(_PREFIX)
    if plain == name or not hasattr(transformers, plain):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(transformers, plain)
