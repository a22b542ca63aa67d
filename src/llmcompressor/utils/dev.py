# SPDX-License-Identifier: Apache-2.0
"""Alternative import path of :mod:`llmcompressor.utils`, with names that only scripts use."""

from llmcompressor.utils.devices import best_device as get_main_device
from llmcompressor.utils.devices import dispatch_for_generation
from llmcompressor.utils.loading import load_context
from llmcompressor.utils.trial import (
    get_high_precision,
    patch_transformers_logger_level,
    skip_weights_download,
    skip_weights_initialize,
)

__all__ = [
    "dispatch_for_generation",
    "get_high_precision",
    "get_main_device",
    "load_context",
    "patch_transformers_logger_level",
    "skip_weights_download",
    "skip_weights_initialize",
]
