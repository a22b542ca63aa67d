# SPDX-License-Identifier: Apache-2.0
"""REAP under another path."""

from llmcompressor.modifiers.reap import REAPPruningModifier

__all__ = ["REAPPruningModifier"]
