# SPDX-License-Identifier: Apache-2.0
"""Pydantic fields shared by several techniques."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

__all__ = ["DEFAULT_DAMPENING", "EARLIER_DAMPENING", "MOVED_TO_THE_RUN", "DampeningFraction"]

DEFAULT_DAMPENING = 0.01
EARLIER_DAMPENING: Mapping[str, str] = MappingProxyType({"percdamp": "dampening_frac"})
"""What the fraction was called."""
MOVED_TO_THE_RUN: Mapping[str, str] = MappingProxyType(
    {
        "sequential_update": 'calibration is sequential unless oneshot is given pipeline="basic".',
        "sequential_targets": "give sequential_targets to oneshot (--sequential-targets).",
    }
)
"""Fields of earlier releases that say how a run goes, and what does that now."""


def _default_for_none(given: Any) -> Any:
    return DEFAULT_DAMPENING if given is None else given


DampeningFraction: TypeAlias = Annotated[
    float, Field(ge=0.0, le=10.0), BeforeValidator(_default_for_none)
]
"""What is added to a Hessian's diagonal, as a fraction of its mean; the default for ``None``."""
