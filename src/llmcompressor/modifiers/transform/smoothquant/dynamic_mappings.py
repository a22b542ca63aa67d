# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.smoothquant.base` has."""

from llmcompressor.modifiers.smoothquant.base import (
    get_layer_mappings_from_model,
)

__all__ = [
    "get_layer_mappings_from_model",
]
