# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.awq.base` has."""

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
