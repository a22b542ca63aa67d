# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :func:`llmcompressor.observers.canonical.flatten_for_calibration`."""

from llmcompressor.observers.canonical import flatten_for_calibration

__all__ = ["flatten_for_calibration"]
