# SPDX-License-Identifier: Apache-2.0
"""Old path of :func:`llmcompressor.entrypoints.saving.modify_save_pretrained`."""

from llmcompressor.entrypoints.saving import modify_save_pretrained

__all__ = ["modify_save_pretrained"]
