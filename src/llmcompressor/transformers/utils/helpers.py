# SPDX-License-Identifier: Apache-2.0
"""Old paths of helpers."""

from llmcompressor.utils.loading import is_model_ct_quantized_from_path

__all__ = ["is_model_ct_quantized_from_path"]
