# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of the MoE preparation that scripts called before a run."""

from llmcompressor.modeling.unneeded import moe_calibration_context, replace_modules_for_calibration

__all__ = ["moe_calibration_context", "replace_modules_for_calibration"]
