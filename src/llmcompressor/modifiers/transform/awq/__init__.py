# SPDX-License-Identifier: Apache-2.0
"""AWQ (arXiv:2306.00978), to be followed by a modifier that quantizes."""

from llmcompressor.modifiers.awq.base import AWQ_MAPPING_REGISTRY, AWQMapping, AWQModifier

__all__ = ["AWQ_MAPPING_REGISTRY", "AWQMapping", "AWQModifier"]
