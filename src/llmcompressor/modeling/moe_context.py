# SPDX-License-Identifier: Apache-2.0
"""Old path of showing all tokens to all experts, which ``oneshot`` does by itself."""

from llmcompressor.modeling.unneeded import MoECalibrationModule, moe_calibration_context

__all__ = ["MoECalibrationModule", "moe_calibration_context"]
