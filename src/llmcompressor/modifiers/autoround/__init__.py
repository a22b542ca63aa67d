# SPDX-License-Identifier: Apache-2.0
"""AutoRound: rounding learned block by block with the signs of gradients."""

from llmcompressor.modifiers.autoround.base import AutoRoundModifier

__all__ = ["AutoRoundModifier"]
