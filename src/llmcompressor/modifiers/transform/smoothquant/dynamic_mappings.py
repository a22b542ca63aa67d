# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.smoothquant.base`."""

from llmcompressor.modifiers.smoothquant.base import (
    get_layer_mappings_from_model,
)

__all__ = [
    "get_layer_mappings_from_model",
]
