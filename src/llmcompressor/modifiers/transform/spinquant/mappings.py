# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.rotation.mappings` has."""

from llmcompressor.modifiers.rotation.mappings import SPINQUANT_MAPPING_REGISTRY, SpinQuantMapping

__all__ = ["SPINQUANT_MAPPING_REGISTRY", "SpinQuantMapping"]
