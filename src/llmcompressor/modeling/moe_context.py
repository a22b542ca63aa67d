# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of the MoE calibration context, which a run does not need."""

from llmcompressor.modeling.unneeded import MoECalibrationModule, moe_calibration_context

__all__ = ["MoECalibrationModule", "moe_calibration_context"]
