# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.modifiers.reap` has."""

from llmcompressor.modifiers.reap import REAPPruningModifier

__all__ = ["REAPPruningModifier"]
