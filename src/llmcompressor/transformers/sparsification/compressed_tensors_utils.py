# SPDX-License-Identifier: Apache-2.0
"""Old path of :func:`llmcompressor.checkpoint.save.modify_save_pretrained`."""

from llmcompressor.checkpoint.save import modify_save_pretrained

__all__ = ["modify_save_pretrained"]
