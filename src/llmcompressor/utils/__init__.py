# SPDX-License-Identifier: Apache-2.0
"""Helpers for a user's own script: loading a model to compress, running a compressed one."""

from llmcompressor.utils.devices import calculate_offload_device_map, dispatch_for_generation
from llmcompressor.utils.loading import load_context

__all__ = ["calculate_offload_device_map", "dispatch_for_generation", "load_context"]
