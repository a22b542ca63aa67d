# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of a patch that offloaded weights of Qwen3-Omni needed."""

from llmcompressor.modeling.unneeded import fast_pos_embed_interpolate

__all__ = ["fast_pos_embed_interpolate"]
