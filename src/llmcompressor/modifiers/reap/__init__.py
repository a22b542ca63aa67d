# SPDX-License-Identifier: Apache-2.0
"""REAP: experts that add little are dropped."""

from llmcompressor.modifiers.reap.base import REAPPruningModifier

__all__ = ["REAPPruningModifier"]
