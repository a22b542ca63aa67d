# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.rotation.mappings`."""

from llmcompressor.modifiers.rotation.mappings import NORM_MAPPING_REGISTRY, NormMapping

__all__ = ["NORM_MAPPING_REGISTRY", "NormMapping"]
