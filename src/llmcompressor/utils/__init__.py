# SPDX-License-Identifier: Apache-2.0
"""Helpers for user scripts: loading a model to compress, running a compressed one."""

from llmcompressor.utils.devices import (
    DisableQuantization,
    calculate_offload_device_map,
    calibration_forward_context,
    custom_offload_device_map,
    disable_cache,
    dispatch_for_generation,
    eval_context,
    get_embeddings,
    targets_embeddings,
    untie_word_embeddings,
)
from llmcompressor.utils.devices import best_device as get_main_device
from llmcompressor.utils.loading import (
    get_high_precision,
    load_context,
    patch_transformers_logger_level,
    skip_weights_download,
    skip_weights_initialize,
)

__all__ = [
    "DisableQuantization",
    "calculate_offload_device_map",
    "calibration_forward_context",
    "custom_offload_device_map",
    "disable_cache",
    "dispatch_for_generation",
    "eval_context",
    "get_embeddings",
    "get_high_precision",
    "get_main_device",
    "load_context",
    "patch_transformers_logger_level",
    "skip_weights_download",
    "skip_weights_initialize",
    "targets_embeddings",
    "untie_word_embeddings",
]
