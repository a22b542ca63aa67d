# SPDX-License-Identifier: Apache-2.0
"""AWQ (arXiv:2306.00978), under the path that it had when it quantized too.

The class itself is ``llmcompressor.modifiers.transform.awq.AWQModifier``. What is called so here
takes the fields of both and gives the two modifiers that they stand for.
"""

from __future__ import annotations

from typing import Any

from llmcompressor.modifiers.awq import base
from llmcompressor.modifiers.awq.base import AWQ_MAPPING_REGISTRY, AWQMapping
from llmcompressor.modifiers.modifier import Modifier

__all__ = ["AWQ_MAPPING_REGISTRY", "AWQMapping", "AWQModifier"]


def AWQModifier(**fields: Any) -> list[Modifier]:  # noqa: N802 - scripts know it as a class
    """AWQ and, if the fields say how to quantize, the ``QuantizationModifier`` that does it.

    Args:
        **fields: of :class:`~llmcompressor.modifiers.awq.base.AWQModifier` and of
            ``QuantizationModifier``.

    Returns:
        The modifiers in order; a recipe takes such a list as it is.
    """
    return base.AWQModifier.from_fields(**fields)
