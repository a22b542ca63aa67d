# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.awq.base`."""

from llmcompressor.modifiers.awq.base import (
    AWQ_MAPPING_REGISTRY,
    AWQMapping,
    default_mappings,
    get_layer_mappings_from_architecture,
)

__all__ = [
    "AWQ_MAPPING_REGISTRY",
    "AWQMapping",
    "default_mappings",
    "get_layer_mappings_from_architecture",
]
