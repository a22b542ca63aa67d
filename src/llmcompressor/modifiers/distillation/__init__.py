# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation from a teacher's outputs (arXiv:1503.02531)."""

from __future__ import annotations

from llmcompressor.runtime.registry import lazy_exports

__all__ = ["OutputDistillationModifier"]

_HOMES = {
    "OutputDistillationModifier": (
        "llmcompressor.modifiers.distillation.output:OutputDistillationModifier"
    ),
}

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
