# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.rotation.mappings`."""

from llmcompressor.modifiers.rotation.mappings import SPINQUANT_MAPPING_REGISTRY, SpinQuantMapping

__all__ = ["SPINQUANT_MAPPING_REGISTRY", "SpinQuantMapping"]
