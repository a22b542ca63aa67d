# SPDX-License-Identifier: Apache-2.0
"""Old path of the collators of :mod:`llmcompressor.datasets.named_inputs`."""

from llmcompressor.datasets.named_inputs import (
    llava_data_collator,
    mllama_data_collator,
    pixtral_data_collator,
    qwen2_vl_data_collator,
)

__all__ = [
    "llava_data_collator",
    "mllama_data_collator",
    "pixtral_data_collator",
    "qwen2_vl_data_collator",
]
