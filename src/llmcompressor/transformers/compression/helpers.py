# SPDX-License-Identifier: Apache-2.0
"""Old path of :func:`llmcompressor.utils.calculate_offload_device_map`."""

from llmcompressor.utils.devices import calculate_offload_device_map

__all__ = ["calculate_offload_device_map"]
