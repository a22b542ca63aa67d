# SPDX-License-Identifier: Apache-2.0
"""Compatibility path for unfusing GPT-OSS experts, which every run does by itself."""

from llmcompressor.modeling.unneeded import (
    replace_modules_for_calibration as convert_model_for_quantization_gptoss,
)

__all__ = ["convert_model_for_quantization_gptoss"]
