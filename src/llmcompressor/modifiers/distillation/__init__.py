# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation from a teacher's outputs (arXiv:1503.02531)."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

__all__ = ["OutputDistillationModifier"]

_HOMES = {
    "OutputDistillationModifier": (
        "llmcompressor.modifiers.distillation.output:OutputDistillationModifier"
    ),
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
