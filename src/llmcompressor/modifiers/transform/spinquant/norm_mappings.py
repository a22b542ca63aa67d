# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.rotation.mappings` has."""

from llmcompressor.modifiers.rotation.mappings import NORM_MAPPING_REGISTRY, NormMapping

__all__ = ["NORM_MAPPING_REGISTRY", "NormMapping"]
