# SPDX-License-Identifier: Apache-2.0
"""Helpers that inspect a model."""

from llmcompressor.utils.pytorch.module import get_no_split_params

__all__ = ["get_no_split_params"]
