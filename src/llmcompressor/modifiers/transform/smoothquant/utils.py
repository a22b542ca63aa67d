# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.smoothquant.base` has."""

from llmcompressor.modifiers.smoothquant.base import MAPPINGS_REGISTRY

__all__ = ["MAPPINGS_REGISTRY"]
