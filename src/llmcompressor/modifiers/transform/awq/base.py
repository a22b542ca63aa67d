# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.awq.base` has."""

from llmcompressor.modifiers.awq.base import AWQModifier

__all__ = ["AWQModifier"]
