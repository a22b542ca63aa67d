# SPDX-License-Identifier: Apache-2.0
"""Old path of saying how a checkpoint calls its experts."""

from llmcompressor.modeling.stored_experts import patch_moe_mappings

__all__ = ["patch_moe_mappings"]
