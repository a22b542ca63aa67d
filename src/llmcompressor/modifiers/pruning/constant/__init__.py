# SPDX-License-Identifier: Apache-2.0
"""Constant pruning: keep the zeros of a sparse model while it is trained."""

from llmcompressor.modifiers.pruning.constant.base import ConstantPruningModifier

__all__ = ["ConstantPruningModifier"]
