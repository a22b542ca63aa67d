# SPDX-License-Identifier: Apache-2.0
"""Old path of a patch that weights which lie elsewhere needed."""

from llmcompressor.modeling.unneeded import fast_pos_embed_interpolate

__all__ = ["fast_pos_embed_interpolate"]
