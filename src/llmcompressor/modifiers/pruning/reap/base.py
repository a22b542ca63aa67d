# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of :mod:`llmcompressor.modifiers.reap`."""

from llmcompressor.modifiers.reap import REAPPruningModifier

__all__ = ["REAPPruningModifier"]
