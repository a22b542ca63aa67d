# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.rotation` has."""

from llmcompressor.modifiers.rotation import NormMapping

__all__ = ["NormMapping"]
