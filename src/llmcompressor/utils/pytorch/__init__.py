# SPDX-License-Identifier: Apache-2.0
"""Helpers that look at a model."""

from llmcompressor.utils.pytorch.module import get_no_split_params

__all__ = ["get_no_split_params"]
