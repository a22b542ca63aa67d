# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.smoothquant.base`."""

from llmcompressor.modifiers.smoothquant.base import (
    DEFAULT_SMOOTHQUANT_MAPPINGS,
    MAPPINGS_REGISTRY,
    LayerMap,
    get_layer_mappings_from_architecture,
)

__all__ = [
    "DEFAULT_SMOOTHQUANT_MAPPINGS",
    "MAPPINGS_REGISTRY",
    "LayerMap",
    "get_layer_mappings_from_architecture",
]
