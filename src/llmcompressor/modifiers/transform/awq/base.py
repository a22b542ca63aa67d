# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.awq.base`."""

from llmcompressor.modifiers.awq.base import (
    AWQMapping,
    AWQModifier,
)

__all__ = [
    "AWQMapping",
    "AWQModifier",
]
