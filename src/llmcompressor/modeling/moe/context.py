# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of ``moe_calibration_context``, which a run does not need."""

from llmcompressor.modeling.unneeded import moe_calibration_context

__all__ = ["moe_calibration_context"]
