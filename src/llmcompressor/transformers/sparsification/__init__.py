# SPDX-License-Identifier: Apache-2.0
"""Old path of :func:`llmcompressor.checkpoint.save.modify_save_pretrained`."""

from llmcompressor.checkpoint.save import modify_save_pretrained
from llmcompressor.transformers.sparsification.sparse_model import SparseAutoModelForCausalLM

__all__ = ["SparseAutoModelForCausalLM", "modify_save_pretrained"]
