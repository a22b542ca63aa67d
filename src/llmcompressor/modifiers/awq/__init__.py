# SPDX-License-Identifier: Apache-2.0
"""AWQ (arXiv:2306.00978) under its former path, where it also quantizes.

The class is ``llmcompressor.modifiers.transform.awq.AWQModifier``. The function of that name here
accepts the fields of both modifiers, and returns the two modifiers.
"""

from __future__ import annotations

from typing import Any

from llmcompressor.core.modifier import Modifier
from llmcompressor.modifiers.awq import base
from llmcompressor.modifiers.awq.base import AWQ_MAPPING_REGISTRY, AWQMapping

__all__ = ["AWQ_MAPPING_REGISTRY", "AWQMapping", "AWQModifier"]


def AWQModifier(**fields: Any) -> list[Modifier]:  # noqa: N802 - scripts know it as a class
    """Create AWQ and, if the fields configure quantization, a subsequent ``QuantizationModifier``.

    Args:
        **fields: fields of :class:`~llmcompressor.modifiers.awq.base.AWQModifier` and of
            ``QuantizationModifier``.

    Returns:
        The modifiers in order; a recipe accepts such a list.
    """
    return base.AWQModifier.from_fields(**fields)
