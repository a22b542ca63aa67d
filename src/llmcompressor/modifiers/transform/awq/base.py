# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.awq.base` has."""

from llmcompressor.modifiers.awq.base import (
    AWQMapping,
    AWQModifier,
)

__all__ = [
    "AWQMapping",
    "AWQModifier",
]
