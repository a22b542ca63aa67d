# SPDX-License-Identifier: Apache-2.0
"""Distillation: a model learns from another's outputs (arXiv:1503.02531)."""

from __future__ import annotations

from typing import Any

from llmcompressor.registry import resolve

__all__ = ["OutputDistillationModifier"]

_HOMES = {
    "OutputDistillationModifier": (
        "llmcompressor.modifiers.distillation.output:OutputDistillationModifier"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve(_HOMES[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
