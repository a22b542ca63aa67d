# SPDX-License-Identifier: Apache-2.0
"""Old path of what :mod:`llmcompressor.utils` has."""

from llmcompressor.utils.devices import calculate_offload_device_map, custom_offload_device_map

__all__ = ["calculate_offload_device_map", "custom_offload_device_map"]
