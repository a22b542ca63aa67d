# SPDX-License-Identifier: Apache-2.0
"""Old path of :func:`llmcompressor.entrypoints.saving.modify_save_pretrained`."""

from llmcompressor.entrypoints.saving import modify_save_pretrained
from llmcompressor.transformers.sparsification.sparse_model import SparseAutoModelForCausalLM

__all__ = ["SparseAutoModelForCausalLM", "modify_save_pretrained"]
