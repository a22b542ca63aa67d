# SPDX-License-Identifier: Apache-2.0
"""AutoRound: rounding learned block by block by signed gradient descent."""

from llmcompressor.modifiers.autoround.base import AutoRoundModifier
from llmcompressor.modifiers.autoround.tune import fix_batch_if_needed

__all__ = ["AutoRoundModifier", "fix_batch_if_needed"]
