# SPDX-License-Identifier: Apache-2.0
"""Old path of what scripts did to a mixture of experts before a run."""

from llmcompressor.modeling.unneeded import moe_calibration_context, replace_modules_for_calibration

__all__ = ["moe_calibration_context", "replace_modules_for_calibration"]
