# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of ``patch_moe_mappings``."""

from llmcompressor.modeling.stored_experts import patch_moe_mappings

__all__ = ["patch_moe_mappings"]
