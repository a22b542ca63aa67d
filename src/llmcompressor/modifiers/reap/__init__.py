# SPDX-License-Identifier: Apache-2.0
"""REAP: router-weighted expert pruning of MoE models (arXiv:2510.13999)."""

from llmcompressor.modifiers.reap.base import REAPPruningModifier

__all__ = ["REAPPruningModifier"]
